"""Noise to sample, one denoising step at a time, with the trajectory that training needs.

Steps inside the window are stochastic (their log-probs are trained), the others follow the ODE.
A sample's noise comes from a generator of its own, so that it does not depend on which worker
made it, nor on what else was in the fragment.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shared.diffusion.transition import Step, euler_step, transition
from shared.learning.algorithms import Variant
from shared.models.sigmas import Sigmas

Velocity = Callable[[Tensor, Tensor], Tensor]
"""(latents (B, ...), sigma (B,)) -> velocity (B, ...)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingPlan:
    sigmas: Sigmas
    window: range
    """Indices of the stochastic steps. Empty: an ODE sample, for evaluation."""
    noise_level: float = 0.0
    variant: Variant = "flow"
    keeps_means: bool = False
    """Whether trajectories hold the means of their stochastic steps."""

    def step(self, indices: Tensor) -> Step:
        """Returns the step of each row from ``indices`` (B,) on the schedule."""
        sigmas = torch.tensor(self.sigmas, dtype=torch.float32)
        return Step(
            sigma=sigmas[indices],
            sigma_next=sigmas[indices + 1],
            sigma_max=float(sigmas[1]),  # as rounded as the others
            noise_level=self.noise_level,
            variant=self.variant,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Trajectory:
    """The stored denoising path of B samples over the K steps of their window."""

    latents: Tensor
    """(B, K+1, ...) float32 states: before each trained step, and after the last."""
    log_probs: Tensor
    """(B, K) float32, under the policy version that generated them."""
    step_indices: Tensor
    """(K,) int64, on the schedule."""
    sigmas: Tensor
    """(T+1,) float32, the schedule itself."""
    means: Tensor | None = None
    """(B, K, ...) float32, of the Gaussians that states were drawn from, where they are kept."""


class Denoising:
    """Takes B samples from noise to data; `advance` takes all of them one step further."""

    def __init__(
        self,
        plan: SamplingPlan,
        *,
        seeds: Sequence[int],
        shape: Sequence[int],
        device: torch.device,
    ) -> None:
        self._plan = plan
        self._shape = tuple(shape)
        self._device = device
        self._generators = [torch.Generator().manual_seed(seed) for seed in seeds]
        self._states: list[Tensor] = []
        self._log_probs: list[Tensor] = []
        self._means: list[Tensor] = []
        self.latents = self._noise()
        self.num_steps_done = 0

    @property
    def done(self) -> bool:
        return self.num_steps_done == len(self._plan.sigmas) - 1

    @torch.no_grad()
    def advance(self, velocity: Velocity) -> None:
        """Takes the next step of the (B, ...) latents."""
        index = self.num_steps_done
        rows = torch.full((len(self._generators),), index)
        step = self._plan.step(rows)
        sigma = step.sigma.to(self._device)
        speed = velocity(self.latents, sigma)
        if index in self._plan.window:
            self._states.append(self.latents)
            taken = transition(speed, self.latents, step, noise=self._noise())
            self._log_probs.append(taken.log_prob)
            if self._plan.keeps_means:
                self._means.append(taken.mean)
            self.latents = taken.latents
            if index == self._plan.window[-1]:
                self._states.append(self.latents)
        else:
            self.latents = euler_step(speed, self.latents, sigma, step.sigma_next.to(self._device))
        self.num_steps_done += 1

    def trajectory(self) -> Trajectory:
        """Returns the finished path.

        Raises:
            ValueError: before the window's last step is done, or when the window is empty.
        """
        if len(self._log_probs) < max(1, len(self._plan.window)):
            raise ValueError("the trained window of this sample is empty or not done yet")
        return Trajectory(
            latents=torch.stack(self._states, dim=1).cpu(),
            log_probs=torch.stack(self._log_probs, dim=1).cpu(),
            step_indices=torch.tensor(list(self._plan.window)),
            sigmas=torch.tensor(self._plan.sigmas, dtype=torch.float32),
            means=torch.stack(self._means, dim=1).cpu() if self._means else None,
        )

    def _noise(self) -> Tensor:
        # Drawn on the CPU in float32, whatever the device: every kind of GPU gets the same noise.
        drawn = [torch.randn(self._shape, generator=generator) for generator in self._generators]
        return torch.stack(drawn).to(self._device)


def denoise(velocity: Velocity, denoising: Denoising) -> Tensor:
    """Takes every remaining step; returns the final latents (B, ...)."""
    while not denoising.done:
        denoising.advance(velocity)
    return denoising.latents
