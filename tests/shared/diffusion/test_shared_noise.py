"""Samples of a group that begin at one noise: what is computed once gives what each alone would,
in all model families."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from shared.devices.chunks import Chunk
from shared.diffusion.loading.models import repeat_rows
from shared.diffusion.policy import sampling_plan
from shared.diffusion.sampling.sampler import Denoising, denoise
from shared.diffusion.sampling.tensors import unpack_trajectory
from shared.diffusion.training.group import PathGroup
from shared.learning.seeds import group_seed, sample_seed
from tests import tiny_models
from tests.shared.diffusion.shared_noise import (
    SAMPLES,
    START,
    STEPS,
    TOLERANCE,
    WINDOW,
    Tiny,
    error,
    load,
    passes,
    unmerged,
)
from tests.tiny_models import PROMPT

CASES = [
    pytest.param(
        family,
        dtype,
        marks=[]
        if (family, dtype) in (("sd3", "float32"), ("flux", "float64"))
        else pytest.mark.slow,
    )
    for family in tiny_models.FAMILIES
    for dtype in TOLERANCE
]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    torch.set_num_threads(1)
    return {}


@pytest.mark.parametrize(("family", "dtype"), CASES)
def test_what_a_group_shares_is_computed_once_and_gives_the_same(
    family: str, dtype: str, folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> None:
    if family not in folders:
        folders[family] = tiny_models.save(family, tmp_path_factory.mktemp(family))
    for guidance in (1.0, 4.0) if family in tiny_models.CFG else (3.5,):
        tiny = load(family, folders[family], dtype, guidance)
        with passes(tiny.policy) as rows:
            stored = tiny.fragment()
        assert rows == [1] * (START + 1) + [SAMPLES] * (STEPS - START - 1)
        path = unpack_trajectory(stored)
        assert path.start is not None and path.latents.shape[:2] == (SAMPLES, WINDOW)
        plain = of_rows(tiny)
        assert float((path.states - plain).abs().max()) <= 1e-6
        check_gradient(tiny, tiny.group(stored), TOLERANCE[dtype])


def of_rows(tiny: Tiny) -> Tensor:
    """States (B, K+1, ...) of the same fragment, with a row of the network for every sample."""
    run, model = tiny.recipe.run, tiny.policy.model
    table = tiny.recipe.model
    shape = model.latent_shape(height=table.height, width=table.width, frames=table.frames)
    seeds = [sample_seed(run.seed, 2, 3, sample) for sample in range(SAMPLES)]
    denoising = Denoising(
        sampling_plan(tiny.recipe, window_start=START), seeds=seeds, shape=shape,
        device=tiny.policy.device,
    )  # fmt: skip
    noise = torch.Generator().manual_seed(group_seed(run.seed, 2, 3))
    denoising.latents = torch.randn(shape, generator=noise).expand(SAMPLES, *shape)
    conditions = repeat_rows(model.encode(PROMPT, guidance=table.guidance), SAMPLES)
    denoise(
        lambda latents, sigma: model.velocity(latents, sigma, conditions, guidance=table.guidance),
        denoising,
    )
    return denoising.trajectory().states


def check_gradient(tiny: Tiny, group: PathGroup, tolerance: float) -> None:
    """Fresh, and stale with log-probs that the clip acts on; all in one pass, and cut. Where a tiny
    network's float32 is not as good as the tolerance, rows that are cut otherwise say how good."""
    moved = 3e-3 * torch.randn(group.log_probs.shape, generator=torch.Generator().manual_seed(1))
    stale = replace(group, log_probs=group.log_probs + moved, staleness=1)
    for each, chunk in ((group, Chunk(3, 1)), (stale, Chunk(SAMPLES, WINDOW))):
        wanted, counted, rows = tiny.gradient(unmerged(each), Chunk(SAMPLES, WINDOW))
        assert rows == [SAMPLES * WINDOW] * 2, "with the reference's"
        found, metrics, rows = tiny.gradient(each, chunk)
        off = error(found, wanted)
        if off > tolerance:
            other, _, _ = tiny.gradient(unmerged(each), Chunk(1, 1))
            assert off <= 2 * error(other, wanted)
        assert sum(rows) == 2 * (1 + SAMPLES * (WINDOW - 1))
        last = SAMPLES % chunk.samples or SAMPLES
        assert rows[-2:] == [last + 1] * 2, "the shared state goes with the last chunk"
        assert metrics == pytest.approx({**counted, "states_per_group": 1}, rel=1e-4, abs=1e-6)
        if not each.staleness:
            assert metrics["onpolicy_ratio_error"] <= 1e-6
        else:
            assert metrics["clip_fraction_low"] + metrics["clip_fraction_high"] > 0
