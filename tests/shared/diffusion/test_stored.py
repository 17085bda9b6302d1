"""Objects that no working service writes: each check says what is wrong and raises nothing else."""

import json
import struct
from collections.abc import Callable

import numpy as np
import pytest
import safetensors.numpy
import torch
from pydantic import ValidationError

from services.reward.scorer import WeightedScorer
from services.reward.scoring import MediaSize, read_media, score_samples
from shared.diffusion.sampling.tensors import pack, unpack
from shared.diffusion.training.rows import check_stored
from shared.errors import ContractError, ScoringError
from shared.recipe.recipe import load_recipe, override
from tests import examples
from tests.paths import DIGITS

RECIPE = override(
    load_recipe(DIGITS), {"sampling.window": 3, "sampling.steps": 10, "sampling.sigmas": "linear"}
)
SAMPLES = 2
GOOD = {
    "latents": torch.randn(SAMPLES, 4, 1, 8, 8),
    "log_probs": torch.randn(SAMPLES, 3),
    "step_indices": torch.arange(3),
    "sigmas": torch.linspace(1, 0, 11, dtype=torch.float64).float(),
}
CONDITIONS = {"text": torch.randn(1, 4, 8), "pooled": torch.randn(1, 8)}


def path(**changes: torch.Tensor) -> bytes:
    return pack({**GOOD, **changes})


def header(text: str) -> bytes:
    return struct.pack("<Q", len(text)) + text.encode() + bytes(64)


def tensor(dtype: str, shape: object) -> bytes:
    return header(json.dumps({"x": {"dtype": dtype, "shape": shape, "data_offsets": [0, 64]}}))


def huge(value: float) -> torch.Tensor:
    latents = GOOD["latents"].clone()
    latents[1, 2, 0, 3, 3] = value
    return latents


def test_what_rollout_stores_is_let_in() -> None:
    check_stored(RECIPE, path(), pack(CONDITIONS), SAMPLES)


@pytest.mark.parametrize(
    ("poison", "said"),
    [
        (path(latents=torch.zeros(5)), "do not fit each other"),
        (path(step_indices=torch.tensor(0)), "do not fit each other"),
        (path(step_indices=torch.arange(3.0)), "do not fit each other"),
        (path(step_indices=torch.tensor([0, 1, 77])), r"steps \[0, 1, 77\] are no window"),
        (path(step_indices=torch.tensor([-3, -2, -1])), "are no window"),
        (path(step_indices=torch.arange(7, 10)), "are no window"),
        (path(sigmas=torch.linspace(1, 0, 11) ** 2), "other sigmas"),
        (path(sigmas=torch.tensor(1.0)), "do not fit each other"),
        (path(latents=huge(2e4)), "latents of up to 20000: not finite, or over 10000"),
        (path(latents=huge(float("nan"))), "latents of up to nan"),
        (path(latents=5e3 * torch.ones(SAMPLES, 4, 1, 8, 8)), "latents of rms 5000"),
        (path(log_probs=torch.full((SAMPLES, 3), 1e30)), "log-prob is not finite, or over"),
        (path(log_probs=torch.zeros(SAMPLES, 0)), "do not fit each other"),
        (path(latents=GOOD["latents"].long()), "do not fit each other"),
        (path(means=torch.zeros(SAMPLES, 3, 1, 8, 8)), "what the algorithm needs of it: means"),
        (path(latents=torch.randn(3, 4, 1, 8, 8), log_probs=torch.randn(3, 3)), "holds 3"),
        (path(more=torch.zeros(1)), "not a trajectory: it holds"),
    ],
)  # fmt: skip
def test_a_trajectory_that_cannot_be_trained_is_refused_with_the_reason(
    poison: bytes, said: str
) -> None:
    with pytest.raises(ContractError, match=said):
        check_stored(RECIPE, poison, pack(CONDITIONS), SAMPLES)


@pytest.mark.parametrize(
    ("poison", "said"),
    [
        (header("[" * 100_000), "its header is not JSON"),
        (header('{"x":' * 50_000), "its header is not JSON"),
        (header("[]" * 8), "its header is not JSON"),
        (header('{"x": 7, "y": 8}'), "'x' is no tensor"),
        (tensor("F8_E4M3", [64]), "'x' has type F8_E4M3"),
        (tensor("F32", [1] * 9), "no shape of at most 8 dimensions"),
        (tensor("F32", [2**40, 2**40]), "larger than the object"),
        (tensor("F32", [-1, 16]), "no shape"),
        (tensor("F32", ["4", 4]), "no shape"),
        (tensor("F32", 16), "no shape"),
    ],
)
def test_a_header_is_looked_at_before_anything_is_believed(poison: bytes, said: str) -> None:
    with pytest.raises(ContractError, match=said):
        unpack(poison)
    with pytest.raises(ContractError):
        read_media(poison, SAMPLES)


@pytest.mark.parametrize(
    "poison",
    [
        {},
        {"text": torch.tensor(1.0)},
        {"text": torch.randn(2, 4, 8)},
        {"text": torch.full((1, 4), float("inf"))},
        {str(n): torch.zeros(1, 1) for n in range(65)},
    ],
)
def test_conditions_are_tensors_of_one_prompt(poison: dict[str, torch.Tensor]) -> None:
    with pytest.raises(ContractError, match="not conditions"):
        check_stored(RECIPE, path(), pack(poison), SAMPLES)


@pytest.mark.parametrize(
    "poison",
    [
        {"samples": torch.tensor(1.0), "seeds": torch.tensor(1)},
        {"samples": torch.randn(SAMPLES, 1, 8, 8), "seeds": torch.randn(SAMPLES)},
        {"samples": 1e5 * torch.ones(SAMPLES, 1, 8, 8), "seeds": torch.arange(SAMPLES)},
        {"samples": torch.randn(SAMPLES, 1, 8, 8)},
    ],
)
def test_finished_samples_have_a_seed_each(poison: dict[str, torch.Tensor]) -> None:
    nft = override(RECIPE, {"algorithm.name": "diffusion-nft"})
    with pytest.raises(ContractError):
        check_stored(nft, pack(poison), pack(CONDITIONS), SAMPLES)


SIZE = MediaSize(height=8, width=8)


@pytest.mark.parametrize(
    ("shape", "dtype", "said"),
    [
        ((), np.uint8, "do not fit 2 samples"),
        ((2000, 1, 8, 8), np.uint8, "do not fit 2 samples"),
        ((2, 8, 8), np.uint8, "do not fit 2 samples"),
        ((2, 1, 8, 8), np.float32, "has type F32, not U8"),
        ((2, 1, 8, 9), np.uint8, "the recipe makes 8 x 8 pixels, 1 frames"),
        ((2, 5, 1, 8, 8), np.uint8, "the recipe makes 8 x 8 pixels, 1 frames"),
        ((2, 0, 8, 8), np.uint8, "do not fit 2 samples"),
        ((2, 7, 8, 8), np.uint8, "the recipe makes"),
    ],
)
def test_media_are_as_many_and_as_large_as_their_fragment_says(
    shape: tuple[int, ...], dtype: type, said: str
) -> None:
    media = safetensors.numpy.save({"images": np.zeros(shape, dtype)})
    with pytest.raises(ContractError, match=said):
        read_media(media, SAMPLES, SIZE)


def test_media_of_the_recipe_are_let_in() -> None:
    images = np.zeros((2, 3, 8, 8), np.uint8)
    assert read_media(safetensors.numpy.save({"images": images}), 2, SIZE).shape == images.shape
    videos = np.zeros((2, 5, 3, 8, 8), np.uint8)
    size = MediaSize(height=8, width=8, frames=5)
    assert read_media(safetensors.numpy.save({"images": videos}), 2, size).shape == videos.shape


class Gives:
    def __init__(self, value: float) -> None:
        self._value = value

    def score(self, media: object, metadata: object, /) -> list[float]:
        return [self._value]


@pytest.mark.parametrize("value", [1e155, -2e6, float("nan"), float("inf")])
def test_a_score_is_a_number_of_sane_size_or_none(value: float) -> None:
    """Squares of 1e155 are no numbers."""
    scorer = WeightedScorer("proxy", 1.0, Gives(value))
    with pytest.raises(ScoringError, match="not finite, or over 1e"):
        score_samples(scorer, np.zeros((1, 1, 8, 8), np.uint8), [{}])
    with pytest.raises(ValidationError):
        examples.scored(examples.task(), (value, 0.0))


@pytest.mark.parametrize("rewards", [(), (1.0,), (1.0, 2.0, 3.0)])
def test_a_message_has_one_score_per_sample(rewards: tuple[float, ...]) -> None:
    with pytest.raises(ValidationError, match="for 2 samples"):
        examples.scored(examples.task(), rewards)


Door = Callable[[bytes], object]


@pytest.mark.parametrize("door", [unpack, lambda data: read_media(data, SAMPLES, SIZE)])
def test_a_flipped_byte_of_a_header_is_a_contract_error_or_another_good_object(door: Door) -> None:
    good = bytearray(safetensors.numpy.save({"images": np.zeros((2, 3, 8, 8), np.uint8)}))
    for place in range(90):
        for value in (0, 34, 91, 255):
            flipped = bytes(good[:place]) + bytes([value]) + bytes(good[place + 1 :])
            try:
                door(flipped)
            except ContractError:
                continue
