"""Noise to sample, one denoising step at a time, with the trajectory that training needs.

Steps inside the window are stochastic (their log-probs are trained), the others follow the ODE.
A sample's noise comes from a generator of its own, so that it does not depend on which worker
made it, nor on what else was in the fragment.

Samples of a group may begin at one noise, of a seed of its own. They are then one row until the
first stochastic step, with the network's call there, and part by the noise of that step: which is
the same as if they had not shared anything before.
"""

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shared.diffusion.loading.device import to_device
from shared.diffusion.sampling.transition import NoiseStep, euler_step, rounded, transition
from shared.learning.algorithms import Variant
from shared.learning.seeds import permutation
from shared.models.sigmas import Sigmas

Velocity = Callable[[Tensor, Tensor], Tensor]
"""(latents (B, ...), sigma (B,)) -> velocity (B, ...)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingPlan:
    sigmas: Sigmas
    window: range
    """Indices of the steps that trajectories hold, which are stochastic. Empty: an ODE sample, for
    evaluation."""
    all_stochastic: bool = False
    """Whether all steps but the last are stochastic, and not only the steps of the window."""
    num_drawn: int | None = None
    """Number of steps of the window that each sample is trained at, drawn by its seed; without it,
    all of them."""
    noise_level: float = 0.0
    variant: Variant = "flow"
    keeps_means: bool = False
    """Whether trajectories hold the means of their stochastic steps."""
    state_dtype: torch.dtype | None = None
    """Narrower type in which trajectories hold states, which are rounded to it as they are made;
    without it, they are held as they are."""

    @property
    def stochastic(self) -> range:
        """Indices of the stochastic steps."""
        return range(len(self.sigmas) - 2) if self.all_stochastic else self.window

    @property
    def sigma_max(self) -> float:
        """`Step.sigma_max`, rounded to float32 as the others are."""
        (rounded,) = struct.unpack("f", struct.pack("f", self.sigmas[1]))
        return float(rounded)

    def step(self, indices: Tensor) -> NoiseStep:
        """Returns the step of each row from ``indices`` (B,) on the schedule."""
        sigmas = torch.tensor(self.sigmas, dtype=torch.float32)
        return NoiseStep(
            sigma=sigmas[indices],
            sigma_next=sigmas[indices + 1],
            sigma_max=self.sigma_max,
            noise_level=self.noise_level,
            variant=self.variant,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Trajectory:
    """The stored denoising path of B samples over the K steps of their window."""

    latents: Tensor
    """(B, K+1, ...) float32 states, or in the plan's type: before each step, and after the last;
    (B, K, ...) without the one before the first, where ``start`` has it."""
    log_probs: Tensor
    """(B, K) float32, under the policy version that generated them."""
    step_indices: Tensor
    """(K,) int64, on the schedule."""
    sigmas: Tensor
    """(T+1,) float32, the schedule itself."""
    means: Tensor | None = None
    """(B, K, ...) float32, of the Gaussians that states were drawn from, where they are kept."""
    start: Tensor | None = None
    """(1, ...) state before the first step, where all samples share it; of the others' type."""
    trained: Tensor | None = None
    """(B, N) int64: which of the K steps each sample is trained at, ascending; without it, at all
    of them."""

    @property
    def states(self) -> Tensor:
        """(B, K+1, ...) states: before each step, and after the last."""
        if self.start is None:
            return self.latents
        start = self.start.expand(len(self.latents), *self.start.shape[1:])
        return torch.cat([start[:, None], self.latents], dim=1)


class Denoising:
    """Takes B samples from noise to data; `advance` takes all of them one step further.

    While samples share what they began at, ``latents`` are one row.
    """

    def __init__(
        self,
        plan: SamplingPlan,
        *,
        seeds: Sequence[int],
        shape: Sequence[int],
        device: torch.device,
        shared_seed: int | None = None,
    ) -> None:
        """``shared_seed``: of the noise that all begin at; without it, each has its own."""
        self._plan = plan
        self._seeds = seeds
        self._shares = shared_seed is not None
        self._shape = tuple(shape)
        self._device = device
        self._sigmas = to_device(torch.tensor(plan.sigmas, dtype=torch.float32), device)
        self._generators = [torch.Generator().manual_seed(seed) for seed in seeds]
        self._start: Tensor | None = None
        self._arrived: list[Tensor] = []
        self._log_probs: list[Tensor] = []
        self._means: list[Tensor] = []
        begun = self._noise()  # drawn in any case: later noise is the same with and without it
        if shared_seed is not None:
            begun = self._drawn([torch.Generator().manual_seed(shared_seed)])
        self.latents = begun
        self.num_steps_done = 0

    @property
    def done(self) -> bool:
        return self.num_steps_done == len(self._plan.sigmas) - 1

    @torch.no_grad()
    def advance(self, velocity: Velocity) -> None:
        """Takes the next step of the (B, ...) latents."""
        index = self.num_steps_done
        if self._plan.window and index == self._plan.window[0]:  # the first state that is kept
            self.latents = rounded(self.latents, self._plan.state_dtype)
        step = self._step(len(self.latents))
        speed = velocity(self.latents, step.sigma)
        if index in self._plan.stochastic:
            self._take(index, speed)
        else:
            self.latents = euler_step(speed, self.latents, step.sigma, step.sigma_next)
        self.num_steps_done += 1

    def _take(self, index: int, speed: Tensor) -> None:
        """Takes a stochastic step by velocities (B, ...), from where samples part: (1, ...)."""
        num, before = len(self._generators), self.latents
        step = transition(
            speed.expand(num, *speed.shape[1:]), before.expand(num, *before.shape[1:]),
            self._step(num), noise=self._noise(),
            state_dtype=self._plan.state_dtype if index in self._plan.window else None,
        )  # fmt: skip
        self.latents = step.latents
        if index in self._plan.window:
            if index == self._plan.window[0]:
                self._start = before
            self._arrived.append(step.latents)
            self._log_probs.append(step.log_prob)
            if self._plan.keeps_means:
                self._means.append(step.mean)

    def _step(self, rows: int) -> NoiseStep:
        """Return the next step of this many rows, on the device."""
        plan, index = self._plan, self.num_steps_done
        return NoiseStep(
            sigma=self._sigmas[index].repeat(rows),
            sigma_next=self._sigmas[index + 1].repeat(rows),
            sigma_max=plan.sigma_max,
            noise_level=plan.noise_level,
            variant=plan.variant,
        )

    def trajectory(self) -> Trajectory:
        """Returns the finished path.

        Raises:
            ValueError: before the window's last step is done, or when the window is empty.
        """
        if self._start is None or len(self._log_probs) < len(self._plan.window):
            raise ValueError("the trained window of this sample is empty or not done yet")
        shares = self._shares and self._plan.window[0] == self._plan.stochastic[0]
        states = self._arrived if shares else [self._start, *self._arrived]
        latents = torch.stack(states, dim=1).to(self._plan.state_dtype or states[0].dtype).cpu()
        return Trajectory(
            latents=latents,
            log_probs=torch.stack(self._log_probs, dim=1).cpu(),
            step_indices=torch.tensor(list(self._plan.window)),
            sigmas=torch.tensor(self._plan.sigmas, dtype=torch.float32),
            means=torch.stack(self._means, dim=1).cpu() if self._means else None,
            start=self._start.to(latents) if shares else None,
            trained=None if self._plan.num_drawn is None else self._trained(self._plan.num_drawn),
        )

    def _trained(self, number: int) -> Tensor:
        """Draws ``number`` of the window's steps for each sample: (B, number), ascending."""
        size = len(self._plan.window)
        drawn = [permutation(seed, size, "trained")[:number] for seed in self._seeds]
        return torch.tensor([sorted(each) for each in drawn])

    def _noise(self) -> Tensor:
        return self._drawn(self._generators)

    def _drawn(self, generators: Sequence[torch.Generator]) -> Tensor:
        # On the CPU in float32, whatever the device: every kind of GPU gets the same noise.
        drawn = [torch.randn(self._shape, generator=generator) for generator in generators]
        return to_device(torch.stack(drawn), self._device)


def denoise(velocity: Velocity, denoising: Denoising) -> Tensor:
    """Takes every remaining step; returns the final latents (B, ...)."""
    while not denoising.done:
        denoising.advance(velocity)
    return denoising.latents
