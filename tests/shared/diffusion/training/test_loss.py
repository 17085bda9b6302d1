"""The surrogate and the KL against the references' numbers (tests/vectors/README.md)."""

import json
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from shared.diffusion.sampling.transition import NoiseStep, Transition, transition
from shared.diffusion.training.loss import (
    Surrogate,
    clipped_surrogate,
    decoupled_surrogate,
    reference_kl,
)
from shared.learning.algorithms import Variant
from tests.paths import VECTORS

CASES: list[dict[str, Any]] = json.loads((VECTORS / "losses.json").read_text())
ARRAYS = dict(np.load(VECTORS / "losses.npz"))
SURROGATES = [case for case in CASES if case["id"].startswith("ppo")]
DIVERGENCES = [case for case in CASES if case["id"].startswith("kl")]


def array(case: dict[str, Any], field: str) -> torch.Tensor:
    return torch.from_numpy(ARRAYS[f"{case['id']}/{field}"])


@pytest.mark.parametrize("case", SURROGATES, ids=lambda case: case["id"])
def test_the_surrogate_is_the_references(case: dict[str, Any]) -> None:
    log_prob = array(case, "log_prob").requires_grad_()
    found = clipped_surrogate(
        log_prob,
        array(case, "old_log_prob"),
        array(case, "advantages"),
        clip_range=case["clip_range"],
        advantage_clip=case["adv_clip_max"],
    )
    found.per_row.mean().backward()

    close = partial(torch.testing.assert_close, rtol=1e-5, atol=1e-6)
    close(found.per_row.detach(), array(case, "per_elem"))
    close(found.ratio, array(case, "ratio"))
    assert float(found.per_row.detach().mean()) == pytest.approx(case["policy_loss"], rel=1e-5)
    assert log_prob.grad is not None
    close(log_prob.grad, array(case, "grad_log_prob"))
    outside = (found.ratio - 1).abs() > case["clip_range"]
    assert float(outside.float().mean()) == pytest.approx(case["clipfrac"])


def test_a_stale_row_is_weighted_up_to_the_cap() -> None:
    """Written out by hand: clip range 0.1, cap 1.2, advantages clipped to 1.5."""
    log_prob = torch.tensor([0.0, 0.05, 0.5, -0.5], dtype=torch.float64).requires_grad_()
    advantage = torch.tensor([1.0, -1.0, 1.0, -4.0], dtype=torch.float64)
    found = decoupled_surrogate(
        log_prob,
        torch.zeros(4, dtype=torch.float64),
        advantage,
        clip_range=0.1,
        advantage_clip=1.5,
        largest_weight=1.2,
    )
    weight = torch.tensor([1.0, math.exp(0.05), 1.2, math.exp(-0.5)], dtype=torch.float64)
    bounded = torch.tensor([1.0, -1.0, 1.0, -1.5], dtype=torch.float64)
    found.per_row.sum().backward()
    torch.testing.assert_close(found.weight, weight)
    torch.testing.assert_close(found.per_row.detach(), -weight * bounded)
    torch.testing.assert_close(log_prob.grad, -weight * bounded)  # of a ratio of 1
    torch.testing.assert_close(found.ratio, log_prob.detach().exp())
    assert torch.equal(found.clipped_ratio, torch.ones(4, dtype=torch.float64))


def test_bypass_drops_the_gradient_that_decoupled_keeps() -> None:
    """A stale row beyond the clip range, whose advantage pushes it further away."""

    def gradient(surrogate: Callable[..., Surrogate]) -> float:
        log_prob = torch.tensor([0.5], requires_grad=True)
        arguments = {"clip_range": 0.1, "advantage_clip": 5.0}
        surrogate(log_prob, torch.zeros(1), torch.ones(1), **arguments).per_row.sum().backward()
        assert log_prob.grad is not None
        return float(log_prob.grad)

    assert gradient(clipped_surrogate) == 0
    assert gradient(partial(decoupled_surrogate, largest_weight=1.5)) == pytest.approx(-1.5)


@pytest.mark.parametrize(
    ("current", "advantage", "wanted"),
    [
        (1e-3, 1.0, 0.0),  # has left the clip range of 1e-4 in the direction of its advantage
        (1e-3, -1.0, 1.2 * 1.0005),  # goes back into it: exp(1e-3 - 5e-4)
        (5.5e-4, 1.0, -1.2 * 1.00005),  # is within it
    ],
)
def test_a_later_update_is_clipped_around_the_start_of_its_batch(
    current: float, advantage: float, wanted: float
) -> None:
    """The version before has generated: behaviour 5e-4 - log 1.25 (its weight is cut off at 1.2),
    start of the batch 5e-4."""
    log_prob = torch.tensor([current], dtype=torch.float64, requires_grad=True)
    start = torch.tensor([5e-4], dtype=torch.float64)
    found = decoupled_surrogate(
        log_prob, start - math.log(1.25), torch.tensor([advantage], dtype=torch.float64),
        clip_range=1e-4, advantage_clip=5.0, largest_weight=1.2, proximal_log_prob=start,
    )  # fmt: skip
    found.per_row.sum().backward()
    assert log_prob.grad is not None
    assert float(log_prob.grad) == pytest.approx(wanted, rel=1e-6)
    assert float(found.ratio) == pytest.approx(1.25)
    assert float(found.clipped_ratio) == pytest.approx(math.exp(current - 5e-4))


@pytest.mark.parametrize("case", DIVERGENCES, ids=lambda case: case["id"])
def test_the_divergence_is_the_references(case: dict[str, Any]) -> None:
    mean = array(case, "mean").requires_grad_()
    rows = len(mean)
    step = Transition(
        latents=mean.detach(),
        mean=mean,
        log_prob=torch.zeros(rows),
        noise_scale=torch.tensor(case["std_dev_t"]),
        sqrt_neg_dt=torch.tensor(case["sqrt_neg_dt"]),
        std=torch.tensor(case["std_dev_t"]) * torch.tensor(case["sqrt_neg_dt"]),
    )
    divergence = reference_kl(step, array(case, "ref_mean")).mean()
    divergence.backward()

    assert float(divergence.detach()) == pytest.approx(case["kl_loss_flow_grpo"], rel=1e-5)
    # The reference's gradient is of the total: policy loss plus beta times the divergence.
    assert case["total"] == pytest.approx(
        case["policy_loss"] + case["beta"] * float(divergence.detach()), rel=1e-5
    )
    assert mean.grad is not None
    torch.testing.assert_close(
        case["beta"] * mean.grad, array(case, "grad_mean"), rtol=1e-5, atol=1e-9
    )


@pytest.mark.parametrize("variant", ["flow", "dance", "cps"])
def test_the_kl_is_that_of_the_gaussians_times_the_step_s_length_whatever_the_variant(
    variant: Variant,
) -> None:
    generator = torch.Generator().manual_seed(0)
    here, there, noisy = (torch.randn(2, 3, 4, generator=generator).double() for _ in range(3))
    sigma, after = torch.tensor([0.9, 0.5]), torch.tensor([0.6, 0.3])
    step = NoiseStep(
        sigma=sigma, sigma_next=after, sigma_max=0.9, noise_level=0.7, variant=variant
    )  # fmt: skip
    taken, reference = (transition(each, noisy, step, arrived=noisy) for each in (here, there))
    std = taken.std[:, None, None].expand_as(noisy)
    gaussians = torch.distributions.kl_divergence(
        torch.distributions.Normal(taken.mean, std), torch.distributions.Normal(reference.mean, std)
    )
    wanted = (sigma - after) * gaussians.mean((1, 2))
    assert reference_kl(taken, reference.mean).tolist() == pytest.approx(wanted.tolist(), rel=1e-6)
