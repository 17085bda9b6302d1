"""Merged steps of several groups in one pass of the network: the gradient of each alone."""

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from shared.devices.chunks import Chunk
from shared.diffusion.policy import load_policy
from shared.diffusion.training.gradient import GradientTransaction
from shared.diffusion.training.group import PathGroup
from shared.diffusion.weights import trained_parameters
from shared.recipe.recipe import load_recipe, override
from tests.paths import DIGITS
from tests.shared.diffusion.shared_noise import SAMPLES, Tiny, Wide, error, move, passes

GROUPS = 3
CPU = torch.device("cpu")


@pytest.fixture(scope="module", params=["float32", "float64"])
def digits(request: pytest.FixtureRequest) -> Tiny:
    """The demo's model, of which a group trains the merged step alone."""
    torch.set_num_threads(1)
    changes = {
        "sampling.steps": 5, "sampling.window": 1, "sampling.sigmas": "linear",
        "sampling.first_window_starts": (1, 1), "sampling.shared_noise": True,
        "batch.groups": GROUPS, "batch.group_size": SAMPLES, "schedule.fragment_size": "auto",
        "trainer.micro_batch": "auto", "trainer.updates": 1, "algorithm.kl_beta": 0.1,
        "model.dtype": request.param,
    }  # fmt: skip
    recipe = override(load_recipe(DIGITS), changes)
    policy = load_policy(recipe, {"transformer", "text", "decoder"})
    move(policy, 0.1)
    return Tiny(recipe, policy)


def groups_of(digits: Tiny) -> list[PathGroup]:
    """Groups of other noise, one of which came in fragments."""
    whole = [digits.fragment(**{"run.seed": seed}) for seed in range(GROUPS)]
    cut = [digits.fragment(first, 2, **{"run.seed": GROUPS}) for first in (0, 2)]
    return [*(digits.group(each) for each in whole), digits.group(*cut)]


def gradient_of(
    digits: Tiny, groups: Sequence[PathGroup], chunk: Chunk, *, together: bool
) -> tuple[dict[str, Tensor], dict[str, float], list[int]]:
    transaction = GradientTransaction.of(digits.recipe, digits.policy.model)
    transaction.begin()
    is_wide = digits.recipe.model.dtype == "float64"
    with passes(digits.policy) as rows, Wide() if is_wide else nullcontext():
        if together:
            transaction.accumulate_together(groups, chunk)
        else:
            for group in groups:
                transaction.accumulate(group, chunk)
    parameters = trained_parameters(digits.policy.model.transformer)
    found = {name: p.grad.clone() for name, p in parameters.items() if p.grad is not None}
    return found, transaction.metrics(), rows


@pytest.fixture
def tolerance(digits: Tiny) -> Iterator[float]:
    yield 1e-10 if digits.recipe.model.dtype == "float64" else 1e-5


def test_the_gradient_is_that_of_each_alone_and_the_network_is_called_once(
    digits: Tiny, tolerance: float
) -> None:
    groups = groups_of(digits)
    alone, metrics, many = gradient_of(digits, groups, Chunk(SAMPLES, 1), together=False)
    found, same, rows = gradient_of(digits, groups, Chunk(SAMPLES * GROUPS, 1), together=True)
    assert error(found, alone) <= tolerance
    assert same == pytest.approx(metrics, rel=1e-4, abs=1e-6)
    states = sum(group.num_states for group in groups)
    assert rows == [states, states], "the trained network, and what it is compared with"
    assert len(many) >= 2 * len(groups)


def test_a_pass_has_no_more_rows_than_a_chunk(digits: Tiny, tolerance: float) -> None:
    groups = groups_of(digits)
    alone, _, _ = gradient_of(digits, groups, Chunk(SAMPLES, 1), together=False)
    found, _, rows = gradient_of(digits, groups, Chunk(2, 1), together=True)
    assert error(found, alone) <= tolerance
    assert max(rows) == 2


def test_groups_of_another_staleness_and_prompts_of_another_length_have_passes_of_their_own(
    digits: Tiny, tolerance: float
) -> None:
    first, second, third, _ = groups_of(digits)
    stale = replace(second, staleness=1)
    longer = {n: torch.cat([t, t], 1) if t.dim() > 2 else t for n, t in third.conditions.items()}
    other = replace(third, conditions=longer)
    mixed = [first, stale, other]
    alone, metrics, _ = gradient_of(digits, mixed, Chunk(SAMPLES, 1), together=False)
    found, same, rows = gradient_of(digits, mixed, Chunk(SAMPLES * GROUPS, 1), together=True)
    assert error(found, alone) <= tolerance
    assert same == pytest.approx(metrics, rel=1e-4, abs=1e-6)
    assert rows == [1] * 6
