"""AWM and DPO against their formulas, written out and differentiated by differences in float64."""

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from shared.devices.chunks import Chunk
from shared.diffusion.loading.models import Conditions
from shared.diffusion.policy import LoadedPolicy
from shared.diffusion.training.forward_process import NoisedSamples
from shared.diffusion.training.matching import PairGroup, awm, dpo
from shared.diffusion.training.objective import Behaviour
from shared.diffusion.training.rows import read_group
from shared.errors import UserError
from shared.recipe.sampling import Algorithm
from tests.trainer.engine.test_algorithms import (
    SIZE,
    WINDOW,
    differences,
    error,
    gradient,
    group,
    policy,
    recipe_of,
)

__all__ = ["policy"]
FRESH = Behaviour(on_policy=True)
generator = torch.Generator().manual_seed(7)
TENSORS = torch.randn(4, 4, 3, 2, generator=generator, dtype=torch.float64)
CLEAN, NOISE, AT, BASE = (TENSORS[place] for place in range(4))
SIGMA = torch.tensor([1.0, 0.75, 0.5, 0.25], dtype=torch.float64)
S = SIGMA.reshape(-1, 1, 1)
NOISED = (1 - S) * CLEAN + S * NOISE


class Fixed:
    """A network whose velocities are what is to be differentiated."""

    def __init__(self, velocity: Tensor) -> None:
        self.at = velocity

    def velocity(self, latents: Tensor, sigma: Tensor, conditions: Conditions) -> Tensor:
        assert torch.equal(latents, NOISED)
        return self.at

    def reference_velocity(self, latents: Tensor, sigma: Tensor, conditions: Conditions) -> Tensor:
        return BASE

    has_start = False

    def start_velocity(self, latents: Tensor, sigma: Tensor, conditions: Conditions) -> Tensor:
        raise AssertionError

    def old_velocity(self, latents: Tensor, sigma: Tensor, conditions: Conditions) -> None:
        return None


def squares(v: Tensor) -> Tensor:
    """Mean square of what v is off from noise - x0."""
    found: Tensor = ((v - (NOISE - CLEAN)) ** 2).flatten(1).mean(1)
    return found


def found_gradient(loss: Callable[[Tensor], Tensor]) -> Tensor:
    at = AT.clone().requires_grad_()
    found: Tensor = torch.autograd.grad(loss(at).sum(), at)[0]
    return found


WEIGHTS: dict[str, Callable[[Tensor], Tensor]] = {
    "uniform": lambda e: e,
    "sigma": lambda e: SIGMA * e,
    "ghuber": lambda e: SIGMA * (torch.pow(e + 1e-10, 0.25) - 1e-10**0.25) / 0.25,
}


@pytest.mark.parametrize("clip", [1.0, 5.0])
@pytest.mark.parametrize("weight", WEIGHTS)
def test_awm_is_a_policy_gradient_whose_log_prob_is_the_error(weight: str, clip: float) -> None:
    """scxue/advantage_weighted_matching at 12b1397b, scripts/train_sd3_awm.py: A is clamped at
    `adv_clip_max` and divided by it, times `advantage_max`, 1. With a clip of 1 it is what
    Flow-Factory does."""
    advantage = torch.tensor([2.0, -0.5, 0.0, -7.0])
    rows = NoisedSamples(
        noised=NOISED, sigma=SIGMA, clean=CLEAN, advantage=advantage, conditions={}
    )
    algorithm = Algorithm.model_validate(
        {"name": "awm", "awm_weight": weight, "advantage_clip": clip, "kl_beta": 0.5}
    )
    bounded = advantage.double().clamp(-clip, clip) / clip

    def written_out(v: Tensor) -> Tensor:
        return -bounded * torch.exp(-WEIGHTS[weight](squares(v)) + WEIGHTS[weight](squares(AT)))

    terms = awm(algorithm, rows, Fixed(AT), FRESH)
    torch.testing.assert_close(terms.surrogate.per_row, written_out(AT), rtol=1e-9, atol=1e-12)
    assert terms.divergence is not None and terms.constant is None
    wanted = ((AT - BASE) ** 2).flatten(1).mean(1)
    torch.testing.assert_close(terms.divergence, wanted, rtol=1e-12, atol=0)
    found = found_gradient(lambda v: awm(algorithm, rows, Fixed(v), FRESH).surrogate.per_row)
    torch.testing.assert_close(found, differences(written_out, AT), rtol=1e-5, atol=1e-8)
    direct = differences(lambda v: bounded * WEIGHTS[weight](squares(v)), AT)
    torch.testing.assert_close(found, direct, rtol=1e-5, atol=1e-8)


def test_dpo_prefers_the_best_by_what_both_have_gained_on_the_base() -> None:
    """Two pairs: rows 0 and 1 are the best, rows 2 and 3 the worst. The second is no pair."""
    rows = NoisedSamples(
        noised=NOISED, sigma=SIGMA, clean=CLEAN,
        advantage=torch.tensor([0.3, 0.0]), conditions={},
    )  # fmt: skip
    algorithm = Algorithm.model_validate({"name": "dpo", "dpo_beta": 3.0, "kl_beta": 0.5})

    def written_out(v: Tensor) -> Tensor:
        gained = squares(v) - squares(BASE)
        z = -3.0 / 2 * (gained[0] - gained[2])
        return torch.stack([-torch.log(1 / (1 + torch.exp(-z))), torch.zeros_like(z)])

    terms = dpo(algorithm, rows, Fixed(AT), FRESH)
    assert terms.constant is not None and not terms.surrogate.per_row.any()
    torch.testing.assert_close(terms.constant, written_out(AT), rtol=1e-9, atol=1e-12)
    moved = ((AT - BASE) ** 2).flatten(1).mean(1)
    assert terms.divergence is not None
    torch.testing.assert_close(terms.divergence, (moved[:2] + moved[2:]) / 2)

    def loss(v: Tensor) -> Tensor:
        constant = dpo(algorithm, rows, Fixed(v), FRESH).constant
        assert constant is not None
        return constant

    found = found_gradient(loss)
    torch.testing.assert_close(found, differences(written_out, AT), rtol=1e-5, atol=1e-8)
    assert found[0].any() and found[2].any() and not found[1].any() and not found[3].any()


def test_a_pair_is_the_best_and_the_worst_with_the_same_noise(policy: LoadedPolicy) -> None:
    recipe = recipe_of("dpo")
    pair = read_group(recipe, group(recipe, policy))
    assert isinstance(pair, PairGroup)
    assert pair.shape == (1, WINDOW) and pair.margin == pytest.approx(1.5 + 1.25)
    samples = read_group(recipe_of("awm"), group(recipe_of("awm"), policy)).samples  # type: ignore[attr-defined]
    assert torch.equal(pair.samples, samples[[0, 3]])
    [rows] = pair.rows(Chunk(1, WINDOW), torch.device("cpu"))
    assert len(rows.noised) == 2 * WINDOW and len(rows.advantage) == WINDOW
    s = rows.sigma.reshape(-1, 1, 1, 1)
    noise = (rows.noised - (1 - s) * rows.clean) / s
    torch.testing.assert_close(noise[:WINDOW], noise[WINDOW:], rtol=1e-4, atol=1e-4)


def test_dpo_does_not_depend_on_the_scale_of_rewards(policy: LoadedPolicy) -> None:
    """Advantages over the batch's standard deviation, which is known late, change nothing then."""
    recipe = recipe_of("dpo")
    data = group(recipe, policy)
    wanted, metrics = gradient(recipe, policy, data, Chunk(SIZE, WINDOW))
    far = tuple(100 * each for each in data.advantages)
    found, _ = gradient(recipe, policy, replace(data, advantages=far), Chunk(1, 1))
    assert error(found, wanted) < 1e-5
    assert math.isfinite(metrics["loss"]) and metrics["loss"] > 0


def test_what_neither_can_do_is_refused() -> None:
    with pytest.raises(UserError, match=r"algorithm\.best_of: dpo trains one pair"):
        recipe_of("dpo", algorithm__best_of=2)
    with pytest.raises(UserError, match=r"trainer\.micro_batch: 4 .*the one pair of a group"):
        recipe_of("dpo", trainer__micro_batch=4)
    with pytest.raises(UserError, match=r"awm_weight"):
        recipe_of("awm", algorithm__awm_weight="huber")
    with pytest.raises(UserError, match=r'"decoupled" is not defined for awm'):
        recipe_of("awm", algorithm__stale_loss="decoupled")
