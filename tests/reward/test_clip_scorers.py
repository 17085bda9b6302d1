"""Scorers on CLIP give what transformers and the papers' formulas give for the same weights."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from services.reward.scorers import clip
from services.reward.scorers.aesthetic import HEAD
from tests.reward.tiny_scorers import (
    PROMPTS,
    SIDE,
    WIDTH,
    Images,
    head,
    images,
    metadata,
    pixels,
    save_clip,
    scorer,
)

COMPARING = ("clip-score", "pick-score", "hpsv2")
CLOSE = 2e-6


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = save_clip(tmp_path_factory.mktemp("clip"))
    layers = head(WIDTH, seed=5)
    save_file({f"layers.{name}": value for name, value in layers.state_dict().items()}, made / HEAD)
    return made


@pytest.fixture(scope="module")
def network(folder: Path) -> Any:
    from transformers import CLIPModel

    return CLIPModel.from_pretrained(folder)


@torch.no_grad()
def output(network: Any, folder: Path, image: Images, prompt: str) -> Any:
    """What transformers makes of one square image and its prompt."""
    from transformers import CLIPTokenizer

    tokens = CLIPTokenizer.from_pretrained(folder)(prompt, return_tensors="pt")
    return network(pixel_values=pixels(image), **tokens)


def wanted(kind: str, found: Any, scale: float) -> float:
    logit = float(found.logits_per_image)
    match kind:
        case "clip-score":
            return 2.5 * max(logit / scale, 0)
        case "pick-score":
            return logit / 26
        case _:
            return logit / scale


@pytest.mark.parametrize("kind", COMPARING)
def test_a_score_is_the_formula_of_the_network_s_own_logit(
    kind: str, folder: Path, network: Any
) -> None:
    given, told = images(8), metadata(8)
    scale = float(network.logit_scale.detach().exp())
    expected = [
        wanted(kind, output(network, folder, image, PROMPTS[index % len(PROMPTS)]), scale)
        for index, image in enumerate(given)
    ]
    assert scorer(kind, folder).score(given, told) == pytest.approx(expected, abs=CLOSE)
    assert np.ptp(expected) > 1e-2
    if kind == "clip-score":
        assert min(expected) == 0 < max(expected)


def test_an_aesthetic_score_is_that_of_the_image_s_unit_vector(folder: Path, network: Any) -> None:
    given = images(5)
    layers = head(WIDTH, seed=5)
    expected = []
    for image in given:
        vector = output(network, folder, image, "whatever").image_embeds.numpy().astype(np.float64)
        assert np.linalg.norm(vector) == pytest.approx(1)
        for layer in layers:
            if isinstance(layer, torch.nn.Linear):
                vector = vector @ layer.weight.double().numpy().T + layer.bias.double().numpy()
        expected.append(float(vector[0, 0]))
    assert scorer("aesthetic", folder).score(given, [{}] * 5) == pytest.approx(expected, abs=CLOSE)
    assert np.ptp(expected) > 1e-3


@pytest.mark.parametrize("kind", [*COMPARING, "aesthetic"])
def test_scores_in_batches_are_those_of_one_by_one(
    kind: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given, told = images(7, 24, 32), metadata(7)
    built = scorer(kind, folder)
    together = built.score(given, told)
    alone = [built.score(given[index : index + 1], told[index : index + 1]) for index in range(7)]
    assert together == pytest.approx([score for [score] in alone], abs=CLOSE)
    monkeypatch.setattr(clip, "PASS_IMAGES", 3)
    assert built.score(given, told) == pytest.approx(together, abs=CLOSE)


def test_an_oblong_image_is_cropped_or_for_hpsv2_gets_margins(folder: Path) -> None:
    [wide] = images(1, SIDE, 2 * SIDE)
    middle = wide[:, :, SIDE // 2 : SIDE // 2 + SIDE]
    told = metadata(1)
    for kind in ("clip-score", "pick-score", "aesthetic"):
        built = scorer(kind, folder)
        assert built.score(wide[None], told) == pytest.approx(
            built.score(middle[None], told), abs=CLOSE
        )
    built = scorer("hpsv2", folder)
    [tall] = images(1, SIDE, SIDE // 2)
    padded = np.pad(tall, ((0, 0), (0, 0), (SIDE // 4, SIDE // 4)))
    assert built.score(tall[None], told) == pytest.approx(built.score(padded[None], told))
    assert built.score(wide[None], told) != pytest.approx(built.score(middle[None], told), abs=1e-4)


def test_a_gray_image_scores_as_its_three_equal_channels(folder: Path) -> None:
    gray = images(2, channels=1)
    built = scorer("pick-score", folder)
    assert built.score(gray, metadata(2)) == built.score(gray.repeat(3, axis=1), metadata(2))


def test_a_video_scores_the_mean_of_its_frames(folder: Path) -> None:
    videos = images(6).reshape(2, 3, 3, 24, 24)
    built = scorer("pick-score", folder)
    frames = [
        built.score(video, [told] * 3) for video, told in zip(videos, metadata(2), strict=True)
    ]
    assert built.score(videos, metadata(2)) == pytest.approx(
        [sum(scores) / 3 for scores in frames], abs=CLOSE
    )


def test_a_prompt_is_read_as_far_as_the_network_reads(folder: Path) -> None:
    built = scorer("pick-score", folder)
    long = "five " * 75
    assert built.score(images(1), [{"prompt": long + "one"}]) == pytest.approx(
        built.score(images(1), [{"prompt": long + "two"}])
    )


@pytest.mark.parametrize("told", [{}, {"prompt": " "}, {"prompt": 5}])
def test_without_a_prompt_there_is_no_score(told: dict[str, object], folder: Path) -> None:
    with pytest.raises(ValueError, match="no prompt"):
        scorer("hpsv2", folder).score(images(1), [told])
