"""Surrogate losses and the KL to the reference, as one value per row.

A row is one trained step of one sample. Rows are summed and divided by the number of rows of the
whole batch, a constant; so the gradient of a batch does not depend on how its rows are split.

Three policies take part: the one that generated a sample and stored its log-probs (behaviour), the
trainer's weights at the start of the batch (proximal), and those that the gradient is taken at.
Where rollout computes with other weights than the trainer's (`rollout.weights`), the behaviour
policy is another one for fresh rows as well, and every row is weighted (`decoupled_surrogate`).

For rows of staleness 0, before the first optimizer step of their batch, all three are the same and
the ratio is 1. It is not computed from the stored log-prob, which differs by rounding where a
sample was generated in a batch of another size or on another kind of GPU: in bfloat16 by more than
published clip ranges, which would then act on rounding. The stored one is measured, not trained on.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from shared.diffusion.sampling.transition import Transition


@dataclass(frozen=True, slots=True)
class Surrogate:
    per_row: Tensor
    """(B,) max of the unclipped and the clipped term, weighted."""
    ratio: Tensor
    """(B,) ratio to the behaviour policy by its stored log-prob, without gradient; 1 on-policy, but
    for rounding."""
    clipped_ratio: Tensor
    """(B,) ratio that the clip acts on, without gradient."""
    weight: Tensor
    """(B,) weight of each row, without gradient."""


def clipped_surrogate(
    log_prob: Tensor,
    old_log_prob: Tensor,
    advantage: Tensor,
    *,
    clip_range: float,
    advantage_clip: float,
) -> Surrogate:
    """Returns PPO's loss per row from log-probs and advantages (B,): Schulman et al. 2017, eq. 7.

    For stale samples this is the bypass: one ratio, to the behaviour policy, both corrects for the
    version in between and is clipped.
    """
    ratio = torch.exp(log_prob - old_log_prob)
    bounded = advantage.clamp(-advantage_clip, advantage_clip)
    clipped = ratio.clamp(1 - clip_range, 1 + clip_range)
    per_row = torch.maximum(-bounded * ratio, -bounded * clipped)
    ratio = ratio.detach()
    return Surrogate(per_row, ratio, ratio, torch.ones_like(ratio))


def onpolicy_surrogate(
    log_prob: Tensor,
    stored_log_prob: Tensor,
    advantage: Tensor,
    *,
    clip_range: float,
    advantage_clip: float,
) -> Surrogate:
    """Returns PPO's loss per row from log-probs and advantages (B,), at the weights that generated
    the rows: the ratio is 1, and none is clipped."""
    current = log_prob.detach()
    surrogate = clipped_surrogate(
        log_prob, current, advantage, clip_range=clip_range, advantage_clip=advantage_clip
    )
    return replace(surrogate, ratio=torch.exp(current - stored_log_prob))


def decoupled_surrogate(
    log_prob: Tensor,
    behaviour_log_prob: Tensor,
    advantage: Tensor,
    *,
    clip_range: float,
    advantage_clip: float,
    largest_weight: float,
    proximal_log_prob: Tensor | None = None,
) -> Surrogate:
    """Returns decoupled PPO's loss per row from log-probs and advantages (B,): min(proximal /
    behaviour, largest weight) x clipped(current / proximal).

    After Hilton et al. 2021 (arXiv 2110.00641), with truncated weights. ``proximal_log_prob``
    belongs to the weights at the batch's start; None before its first optimizer step, when the
    proximal policy is the current one: then no further forward pass is needed, and the clip does
    not act.
    """
    proximal = log_prob.detach() if proximal_log_prob is None else proximal_log_prob
    clipped = clipped_surrogate(
        log_prob, proximal, advantage, clip_range=clip_range, advantage_clip=advantage_clip
    )
    ratio = torch.exp(proximal - behaviour_log_prob)
    weight = ratio.clamp(max=largest_weight)
    return Surrogate(weight * clipped.per_row, ratio, clipped.clipped_ratio, weight)


def guarded_surrogate(
    step: Transition,
    behaviour_log_prob: Tensor,
    behaviour_mean: Tensor,
    advantage: Tensor,
    *,
    clip_range: float,
    advantage_clip: float,
    on_policy: bool = False,
) -> Surrogate:
    """Returns GRPO-Guard's loss per row (Wang et al. 2025): a ratio with mean 1 and equal spread at
    every step, from log-probs and advantages (B,) and means (B, ...).

    A log-prob per element falls by |new mean - old mean|^2 / 2 std^2 on average, so that ratios
    drift below 1 and a clip range acts on one side only; and its spread goes with 1 / std. Both are
    corrected: log ratio = std (log-prob - old log-prob) + |new mean - old mean|^2 / 2 std, means of
    squares over elements. Gradients are divided by the step's length in sigma, which they are in
    proportion to, so that no step counts more than another.

    ``on_policy``: the weights in use generated the rows: their log-prob and mean are then the
    current ones, as in `onpolicy_surrogate`.
    """
    stored = _guarded_log_ratio(step, behaviour_log_prob, behaviour_mean)
    log_ratio = stored
    if on_policy:
        log_ratio = _guarded_log_ratio(step, step.log_prob.detach(), step.mean.detach())
    surrogate = clipped_surrogate(
        log_ratio, torch.zeros_like(log_ratio), advantage,
        clip_range=clip_range, advantage_clip=advantage_clip,
    )  # fmt: skip
    weight = 1 / step.sqrt_neg_dt**2
    return replace(surrogate, per_row=weight * surrogate.per_row, ratio=torch.exp(stored.detach()))


def _guarded_log_ratio(step: Transition, old_log_prob: Tensor, old_mean: Tensor) -> Tensor:
    drift = ((step.mean - old_mean) ** 2).flatten(1).mean(1)
    return step.std * (step.log_prob - old_log_prob) + drift / (2 * step.std)


def reference_kl(step: Transition, reference_mean: Tensor) -> Tensor:
    """Returns (B,): the mean squared distance of the two means (B, ...) over 2 g^2, as Flow-GRPO
    weights it.

    It is the Gaussian KL per element times the step's length, for every variant; coefficients in
    published recipes of flow and dance belong to this form.
    """
    squares = ((step.mean - reference_mean) ** 2).flatten(1).mean(1)
    return squares / (2 * step.noise_scale**2)
