"""The clipped surrogate and the KL to the reference, as one value per row.

A row is one trained step of one sample. Rows are summed and divided by the number of rows of the
whole batch, a constant; so the gradient of a batch does not depend on how its rows are split.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from shared.diffusion.transition import Transition


@dataclass(frozen=True, slots=True)
class Surrogate:
    per_row: Tensor
    """(B,) max of the unclipped and the clipped term."""
    ratio: Tensor
    """(B,) without gradient."""


def clipped_surrogate(
    log_prob: Tensor,
    old_log_prob: Tensor,
    advantage: Tensor,
    *,
    clip_range: float,
    advantage_clip: float,
) -> Surrogate:
    """PPO's loss per row, from log-probs (B,) and advantages (B,): Schulman et al. 2017, eq. 7."""
    ratio = torch.exp(log_prob - old_log_prob)
    bounded = advantage.clamp(-advantage_clip, advantage_clip)
    clipped = ratio.clamp(1 - clip_range, 1 + clip_range)
    return Surrogate(torch.maximum(-bounded * ratio, -bounded * clipped), ratio.detach())


def reference_kl(step: Transition, reference_mean: Tensor) -> Tensor:
    """(B,) mean squared distance of the two means over 2 g^2, as Flow-GRPO weights it.

    That is the Gaussian KL per element times the step's length; its coefficients in published
    recipes belong to this form.
    """
    squares = ((step.mean - reference_mean) ** 2).flatten(1).mean(1)
    return squares / (2 * step.noise_scale**2)
