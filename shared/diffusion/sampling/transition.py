"""One denoising step as a Gaussian transition: sampled and re-evaluated by the same function.

Notation (docs/algorithms/flow-grpo.md): x_s = (1 - s) data + s noise, velocity v = noise - data,
a step goes from sigma s to s' < s with dt = s' - s < 0. The transition is N(mean, std^2 I) with
mean = c_x x + c_v v:

    flow   g = a sqrt(s / (1 - s~)), s~ = min(s, sigma_max)          std = g sqrt(-dt)   Flow-GRPO
    dance  g = a                                                     std = g sqrt(-dt)   DanceGRPO
    cps    std = s' sin(a pi / 2)                                                         CPS

    flow, dance:  c_x = 1 + g^2 dt / 2s,   c_v = dt (1 + g^2 (1 - s) / 2s)
    cps:          c_x = (1 - s') + r,      c_v = (1 - s) r - s (1 - s'),  r = sqrt(s'^2 - std^2)

The log-prob is the MEAN over a sample's elements, so that clip ranges live on a scale of one over
the number of elements. CPS drops 1/(2 std^2) and the normaliser, as all of its users do.

Shapes: B rows (samples, or samples x steps: every row has its own sigmas), then any latent shape.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from shared.learning.algorithms import Variant


@dataclass(frozen=True, slots=True, kw_only=True)
class NoiseStep:
    """Where each of the B rows stands on the noise schedule."""

    sigma: Tensor
    """(B,) float32, where the step starts."""
    sigma_next: Tensor
    """(B,) float32, where it ends; smaller than ``sigma``."""
    sigma_max: float
    """The second sigma of the schedule: stands in for a larger one in the flow variant. It is the
    first: 1, where g has no value, or as good as 1 (Wan's own grid begins at .999999)."""
    noise_level: float
    """The field's a (flow, cps) or eta (dance); positive."""
    variant: Variant = "flow"


@dataclass(frozen=True, slots=True, kw_only=True)
class Transition:
    latents: Tensor
    """(B, ...) where the step arrived. Carries no gradient."""
    mean: Tensor
    """(B, ...) of the Gaussian; carries the gradient of the velocity."""
    log_prob: Tensor
    """(B,) mean log-density of ``latents`` per element; carries the gradient."""
    noise_scale: Tensor
    """(B,) the g of flow and dance; for cps the one that gives its std: g sqrt(-dt), as theirs."""
    sqrt_neg_dt: Tensor
    """(B,) square root of the step's length in sigma."""
    std: Tensor
    """(B,) standard deviation of the Gaussian."""


def transition(
    velocity: Tensor,
    latents: Tensor,
    step: NoiseStep,
    *,
    noise: Tensor | None = None,
    arrived: Tensor | None = None,
    state_dtype: torch.dtype | None = None,
) -> Transition:
    """Sample a step from velocity (B, ...) and latents (B, ...) with ``noise`` (B, ...), or
    re-evaluate it for the next state ``arrived`` (B, ...).

    All arithmetic is float32 (float64 if both inputs are). A state in a narrower ``state_dtype`` is
    rounded before its log-prob is taken, so a replay has the same log-prob to the last bit.

    Raises:
        ValueError: unless exactly one of ``noise`` and ``arrived`` is given and the noise level is
            positive (a deterministic step has no log-prob: use `euler_step`).
    """
    if (noise is None) == (arrived is None):
        raise ValueError("give either noise (to sample) or arrived (to re-evaluate), not both")
    if step.noise_level <= 0:
        raise ValueError("a transition needs a positive noise_level; use euler_step without noise")

    dtype = torch.promote_types(torch.promote_types(velocity.dtype, latents.dtype), torch.float32)
    velocity, latents = velocity.to(dtype), latents.to(dtype)
    sigma, sigma_next = step.sigma.to(latents), step.sigma_next.to(latents)
    sqrt_neg_dt = torch.sqrt(sigma - sigma_next)
    noise_scale, std, c_x, c_v = _coefficients(step, sigma, sigma_next, sqrt_neg_dt)

    mean = _rows(c_x, latents) * latents + _rows(c_v, latents) * velocity
    if arrived is None:
        assert noise is not None
        arrived = rounded(mean + _rows(std, latents) * noise.to(latents), state_dtype)
    arrived = arrived.detach().to(dtype)
    log_prob = _log_prob(arrived, mean, std, step.variant)
    return Transition(
        latents=arrived, mean=mean, log_prob=log_prob,
        noise_scale=noise_scale, sqrt_neg_dt=sqrt_neg_dt, std=std,
    )  # fmt: skip


def rounded(states: Tensor, dtype: torch.dtype | None) -> Tensor:
    """Rounds states to a narrower type, and returns them in their own."""
    return states if dtype is None else states.to(dtype).to(states.dtype)


def euler_step(velocity: Tensor, latents: Tensor, sigma: Tensor, sigma_next: Tensor) -> Tensor:
    """Takes the deterministic step x' = x + dt v: (B, ...) from v and x (B, ...), sigmas (B,)."""
    dt = (sigma_next - sigma).to(latents)
    return latents + _rows(dt, latents) * velocity.to(latents.dtype)


def _coefficients(
    step: NoiseStep, sigma: Tensor, sigma_next: Tensor, sqrt_neg_dt: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    if step.variant == "cps":
        std = sigma_next * math.sin(step.noise_level * math.pi / 2)
        kept = torch.sqrt(sigma_next**2 - std**2)
        return (
            std / sqrt_neg_dt,
            std,
            1 - sigma_next + kept,
            (1 - sigma) * kept - sigma * (1 - sigma_next),
        )

    dt = sigma_next - sigma
    if step.variant == "flow":
        noise_scale = step.noise_level * torch.sqrt(sigma / (1 - sigma.clamp(max=step.sigma_max)))
    else:
        noise_scale = torch.full_like(sigma, step.noise_level)
    drift = noise_scale**2 / (2 * sigma)
    return noise_scale, noise_scale * sqrt_neg_dt, 1 + drift * dt, dt * (1 + drift * (1 - sigma))


def _log_prob(arrived: Tensor, mean: Tensor, std: Tensor, variant: Variant) -> Tensor:
    squares = ((arrived - mean) ** 2).flatten(1).mean(1)
    if variant == "cps":
        return -squares
    return -squares / (2 * std**2) - torch.log(std) - 0.5 * math.log(2 * math.pi)


def _rows(values: Tensor, like: Tensor) -> Tensor:
    """Reshapes (B,) to broadcast over the latent dimensions of ``like`` (B, ...)."""
    return values.reshape(-1, *([1] * (like.dim() - 1)))
