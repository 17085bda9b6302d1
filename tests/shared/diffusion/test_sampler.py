import itertools
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from shared.diffusion.sampling.sampler import Denoising, SamplingPlan, Trajectory, denoise
from shared.diffusion.sampling.tensors import pack_trajectory, unpack_trajectory
from shared.diffusion.sampling.transition import NoiseStep, euler_step, transition
from shared.learning.algorithms import Variant
from shared.models.sigmas import linear_sigmas

CPU = torch.device("cpu")
SHAPE = (2, 4, 4)


def test_a_schedule_may_begin_a_rounding_below_one() -> None:
    """Wan's own scheduler begins at .999999; one clamped nowhere has g = 695 there."""
    later, states = (0.95, 0.88, 0.76, 0.0), []
    for first in (1.0, 0.999999):
        plan = SamplingPlan(sigmas=(first, *later), window=range(2), noise_level=0.7)
        taken = transition(
            torch.ones(2, 3), torch.ones(2, 3), plan.step(torch.tensor([0, 1])),
            noise=torch.ones(2, 3),
        )  # fmt: skip
        states.append(taken.latents)
        assert float(taken.std.max()) < 1
    torch.testing.assert_close(*states, rtol=1e-4, atol=1e-4)


def plan(window: range) -> SamplingPlan:
    return SamplingPlan(sigmas=linear_sigmas(6), window=window, noise_level=0.7)


def velocity(latents: Tensor, sigma: Tensor) -> Tensor:
    """Any function of each row alone."""
    return torch.tanh(latents) * (1 + sigma.reshape(-1, 1, 1, 1))


def sample(window: range, seeds: list[int]) -> Denoising:
    denoising = Denoising(plan(window), seeds=seeds, shape=SHAPE, device=CPU)
    denoise(velocity, denoising)
    return denoising


def test_a_sample_does_not_depend_on_what_else_is_in_its_fragment() -> None:
    together = sample(range(1, 4), [11, 12, 13])
    alone = sample(range(1, 4), [12])
    assert torch.equal(together.latents[1:2], alone.latents)
    assert torch.equal(together.trajectory().latents[1], alone.trajectory().latents[0])


def test_other_seeds_give_other_samples() -> None:
    made = sample(range(1, 4), [1, 2])
    assert not torch.allclose(made.latents[0], made.latents[1])


def test_without_a_window_the_sample_is_the_ode_solution() -> None:
    sigmas = linear_sigmas(6)
    latents = torch.randn(SHAPE, generator=torch.Generator().manual_seed(5))[None]
    for before, after in itertools.pairwise(sigmas):
        sigma = torch.tensor([before])
        latents = euler_step(velocity(latents, sigma), latents, sigma, torch.tensor([after]))
    made = sample(range(0), [5])
    torch.testing.assert_close(made.latents, latents)
    with pytest.raises(ValueError, match="window"):
        made.trajectory()


def test_a_trajectory_holds_the_states_around_each_trained_step() -> None:
    window = range(2, 5)
    path = sample(window, [1, 2]).trajectory()
    assert path.latents.shape == (2, 4, *SHAPE)
    assert path.log_probs.shape == (2, 3)
    assert path.step_indices.tolist() == [2, 3, 4]
    for position, index in enumerate(window):
        before, after = path.latents[:, position], path.latents[:, position + 1]
        step = plan(window).step(torch.tensor([index, index]))
        replayed = transition(velocity(before, step.sigma), before, step, arrived=after)
        assert torch.equal(replayed.log_prob, path.log_probs[:, position])


def test_rows_may_stand_at_different_steps() -> None:
    rows = torch.tensor([1, 4])
    latents = torch.randn(2, *SHAPE)
    noise = torch.randn(2, *SHAPE)
    both = transition(latents, latents, plan(range(1)).step(rows), noise=noise)
    for row in (0, 1):
        only = slice(row, row + 1)
        one = transition(
            latents[only], latents[only], plan(range(1)).step(rows[only]), noise=noise[only]
        )
        torch.testing.assert_close(both.log_prob[only], one.log_prob)
        torch.testing.assert_close(both.latents[only], one.latents)


def test_a_step_without_noise_is_refused() -> None:
    step = NoiseStep(
        sigma=torch.ones(1), sigma_next=torch.full((1,), 0.5), sigma_max=0.5, noise_level=0.0
    )
    latents = torch.zeros(1, *SHAPE)
    with pytest.raises(ValueError, match="positive noise_level"):
        transition(latents, latents, step, noise=latents)
    with pytest.raises(ValueError, match="not both"):
        transition(latents, latents, step, noise=latents, arrived=latents)


def test_replay_carries_the_gradient_through_the_mean_alone() -> None:
    latents = torch.randn(3, *SHAPE, dtype=torch.float64)
    speed = torch.randn(3, *SHAPE, dtype=torch.float64, requires_grad=True)
    step = plan(range(1)).step(torch.tensor([1, 2, 3]))
    arrived = transition(speed.detach(), latents, step, noise=torch.randn_like(latents)).latents

    def log_prob(v: Tensor) -> Tensor:
        return transition(v, latents, step, arrived=arrived).log_prob

    assert torch.autograd.gradcheck(log_prob, (speed,))


@pytest.mark.parametrize("variant", ["flow", "dance", "cps"])
@pytest.mark.parametrize("shared_seed", [None, 5])
def test_states_rounded_as_they_are_made_keep_their_log_probs_and_take_half_of_the_bytes(
    shared_seed: int | None, variant: Variant
) -> None:
    """Rounded afterwards they have others."""
    window, shape, errors, sizes = range(2, 5), (2, 16, 16), [], []
    for kept in (torch.bfloat16, None):
        rounding = replace(plan(window), state_dtype=kept, variant=variant)
        denoising = Denoising(
            rounding, seeds=[1, 2], shape=shape, device=CPU, shared_seed=shared_seed
        )
        denoise(velocity, denoising)
        path = denoising.trajectory()
        sizes.append(len(pack_trajectory(path)))
        start = path.start if path.start is None else path.start.bfloat16()
        path = unpack_trajectory(
            pack_trajectory(replace(path, latents=path.latents.bfloat16(), start=start))
        )
        assert path.latents.dtype == torch.float32
        errors.append(max(_replay_errors(rounding, path)))
    assert errors[0] == 0 < 1e-6 < errors[1]
    assert sizes[0] < 0.6 * sizes[1]


def _replay_errors(plan: SamplingPlan, path: Trajectory) -> Iterator[float]:
    for position, index in enumerate(plan.window):
        before, after = path.states[:, position], path.states[:, position + 1]
        step = plan.step(torch.full((len(before),), index))
        replayed = transition(velocity(before, step.sigma), before, step, arrived=after)
        yield float((replayed.log_prob - path.log_probs[:, position]).abs().max())
