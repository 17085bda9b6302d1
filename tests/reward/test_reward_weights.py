"""Published weights, made into folders, score as the published networks do."""

from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from bench.digits.text import clip_tokenizer
from digenrl.commands.cli import app
from digenrl.hub.reward_weights import make_folder
from shared.errors import UserError
from tests.reward.published import BlipVision, OpenClip
from tests.reward.tiny_scorers import (
    BLIP_WIDTH,
    PROMPTS,
    WIDTH,
    bert_tokenizer,
    blip_config,
    head,
    images,
    metadata,
    pixels,
    save_clip,
    scorer,
    shaken,
)

CLOSE = 5e-6


@pytest.fixture
def like(tmp_path: Path) -> Path:
    return save_clip(tmp_path / "clip", act="gelu", seed=9)


def test_hpsv2_scores_as_open_clip_does(like: Path, tmp_path: Path) -> None:
    tokenizer = clip_tokenizer(77)
    network: Any = shaken(OpenClip(len(tokenizer)), seed=3)
    weights, out = tmp_path / "hps.pt", tmp_path / "hpsv2"
    torch.save({"epoch": 1, "state_dict": network.state_dict()}, weights)
    done = CliRunner().invoke(
        app, ["model", "reward", "hpsv2", str(weights), "--like", str(like), "--out", str(out)]
    )
    assert done.exit_code == 0, done.output
    given = images(4)
    expected = [
        network.cosine(pixels(image), tokenizer(prompt, return_tensors="pt")["input_ids"])
        for image, prompt in zip(given, PROMPTS, strict=True)
    ]
    assert scorer("hpsv2", out).score(given, metadata(4)) == pytest.approx(expected, abs=CLOSE)


@torch.no_grad()
def test_image_reward_scores_as_blip_does(tmp_path: Path) -> None:
    from transformers import BlipTextModel

    vision: Any = shaken(BlipVision(), seed=4)
    config = blip_config().text_config
    text: Any = shaken(BlipTextModel(config, add_pooling_layer=False), seed=5)
    layers, tokenizer = head(BLIP_WIDTH, seed=6), bert_tokenizer()
    parts = {"blip.visual_encoder": vision, "blip.text_encoder": text, "mlp.layers": layers}
    state = {
        f"{part}.{name}": value
        for part, network in parts.items()
        for name, value in network.state_dict().items()
    }
    state["blip.text_encoder.embeddings.position_ids"] = torch.arange(64)[None]
    state["blip.vision_proj.weight"] = torch.zeros(3, BLIP_WIDTH)
    torch.save(state, tmp_path / "ImageReward.pt")
    tokenizer.save_pretrained(tmp_path / "bert")
    out = tmp_path / "image-reward"
    make_folder("image-reward", tmp_path / "ImageReward.pt", tmp_path / "bert", out)
    given, expected = images(4), []
    for image, prompt in zip(given, PROMPTS, strict=True):
        tokens = tokenizer(prompt, return_tensors="pt")
        read = text(tokens["input_ids"], encoder_hidden_states=vision(pixels(image)))
        expected.append(float(layers(read.last_hidden_state[:, 0]) - 0.16717362830052426))
    found = scorer("image-reward", out).score(given, metadata(4))
    assert [1.0333394966054072 * score for score in found] == pytest.approx(expected, abs=CLOSE)


def test_the_aesthetic_head_goes_beside_its_clip(like: Path, tmp_path: Path) -> None:
    layers = head(WIDTH, seed=7)
    weights, out = tmp_path / "linear.pth", tmp_path / "aesthetic"
    torch.save({f"layers.{name}": value for name, value in layers.state_dict().items()}, weights)
    make_folder("aesthetic", weights, like, out)
    assert len(scorer("aesthetic", out).score(images(3), [{}] * 3)) == 3


def test_what_is_no_such_file_is_one_line(like: Path, tmp_path: Path) -> None:
    weights, out = tmp_path / "weights.pt", tmp_path / "out"
    with pytest.raises(UserError, match="--like: no folder"):
        make_folder("hpsv2", weights, tmp_path / "nowhere", out)
    with pytest.raises(UserError, match=r"--out: .* already exists"):
        make_folder("hpsv2", weights, like, like)
    with pytest.raises(UserError, match="WEIGHTS: cannot read"):
        make_folder("hpsv2", weights, like, out)
    torch.save([1, 2], weights)
    with pytest.raises(UserError, match=r"WEIGHTS: .* contains no named tensors"):
        make_folder("hpsv2", weights, like, out)
    torch.save({"something": torch.zeros(1)}, weights)
    with pytest.raises(
        UserError, match=r"WEIGHTS: .* has no visual\.proj; is it the file of hpsv2"
    ):
        make_folder("hpsv2", weights, like, out)
    assert not out.exists()
