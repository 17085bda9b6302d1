"""ImageReward gives what BLIP of transformers and the paper's head give for the same weights."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from services.reward.scorers import image_reward
from shared.errors import UserError
from tests.reward.tiny_scorers import (
    BLIP_WIDTH,
    PROMPTS,
    SIDE,
    bert_tokenizer,
    blip_config,
    head,
    images,
    metadata,
    pixels,
    save_processor,
    scorer,
    shaken,
)

CLOSE = 5e-6


@pytest.fixture(scope="module")
def retrieval() -> Any:
    """The same encoders in another of transformers' models."""
    from transformers import BlipForImageTextRetrieval

    return shaken(BlipForImageTextRetrieval(blip_config()), seed=1)


@pytest.fixture(scope="module")
def layers() -> nn.Sequential:
    return head(BLIP_WIDTH, seed=2)


@pytest.fixture(scope="module")
def folder(retrieval: Any, layers: nn.Sequential, tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("image-reward")
    parts = ("vision_model.", "text_encoder.")
    tensors = {
        name: value for name, value in retrieval.state_dict().items() if name.startswith(parts)
    }
    tensors |= {f"mlp.layers.{name}": value for name, value in layers.state_dict().items()}
    save_file(tensors, made / "model.safetensors")
    blip_config().save_pretrained(made)
    bert_tokenizer().save_pretrained(made)
    save_processor(made)
    return made


@torch.no_grad()
def wanted(retrieval: Any, layers: nn.Sequential, image: Any, prompt: str) -> float:
    tokens = bert_tokenizer()(
        prompt, padding="max_length", truncation=True, max_length=35, return_tensors="pt"
    )
    found = retrieval(
        input_ids=tokens["input_ids"],
        attention_mask=tokens["attention_mask"],
        pixel_values=pixels(image),
    )
    number = layers(found.question_embeds[:, 0])
    return float((number - 0.16717362830052426) / 1.0333394966054072)


def test_a_score_is_the_head_s_number_of_the_first_token(
    folder: Path, retrieval: Any, layers: nn.Sequential
) -> None:
    given = images(6)
    expected = [
        wanted(retrieval, layers, image, PROMPTS[index % len(PROMPTS)])
        for index, image in enumerate(given)
    ]
    found = scorer("image-reward", folder).score(given, metadata(6))
    assert found == pytest.approx(expected, abs=CLOSE)
    assert np.ptp(expected) > 1e-2


def test_both_the_image_and_the_prompt_make_a_difference(folder: Path) -> None:
    built = scorer("image-reward", folder)
    one, other = images(2)
    pairs = [(one, "five"), (other, "five"), (one, "a cat")]
    scores = built.score(
        np.stack([image for image, _ in pairs]), [{"prompt": text} for _, text in pairs]
    )
    assert min(abs(a - b) for a, b in ((scores[0], scores[1]), (scores[0], scores[2]))) > 1e-4


def test_scores_in_batches_are_those_of_one_by_one(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    built, given, told = scorer("image-reward", folder), images(5, 24, 40), metadata(5)
    together = built.score(given, told)
    alone = [built.score(given[index : index + 1], told[index : index + 1]) for index in range(5)]
    assert together == pytest.approx([score for [score] in alone], abs=CLOSE)
    monkeypatch.setattr(image_reward, "PASS_IMAGES", 2)
    assert built.score(given, told) == pytest.approx(together, abs=CLOSE)


def test_the_middle_of_an_oblong_image_is_scored_and_35_tokens_of_its_prompt(folder: Path) -> None:
    built = scorer("image-reward", folder)
    wide = images(1, SIDE, 2 * SIDE)
    middle = wide[..., SIDE // 2 : SIDE // 2 + SIDE]
    long, longer = {"prompt": "a " * 33}, {"prompt": "a " * 33 + "b"}
    assert built.score(wide, [long]) == pytest.approx(built.score(middle, [longer]), abs=CLOSE)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("text_encoder.encoder.layer.0.crossattention.self.key.weight", "holds no weights "),
        ("vision_model.post_layernorm.weight", "holds no weights post_layernorm.weight"),
        ("mlp.layers.0.bias", "has no weight or no bias"),
    ],
)
def test_a_weight_that_is_missing_is_named(
    name: str, said: str, folder: Path, tmp_path: Path
) -> None:
    copy = shutil.copytree(folder, tmp_path / "copy")
    tensors = load_file(copy / "model.safetensors")
    del tensors[name]
    save_file(tensors, copy / "model.safetensors")
    with pytest.raises(UserError, match=r"reward\.scorers\.x\.folder: ") as raised:
        scorer("image-reward", copy)
    assert said in str(raised.value) and "\n" not in str(raised.value)
