"""Objectives: functions that turn rows into a loss per row (`shared.learning.algorithms`)."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pkgutil import resolve_name
from typing import Any, Protocol

from torch import Tensor

from shared.diffusion.loading.models import Conditions
from shared.diffusion.sampling.transition import Transition, transition
from shared.diffusion.training.forward_process import NoisedSamples, branches
from shared.diffusion.training.group import TransitionRows
from shared.diffusion.training.loss import (
    Surrogate,
    clipped_surrogate,
    decoupled_surrogate,
    guarded_surrogate,
    onpolicy_surrogate,
    reference_kl,
)
from shared.learning.algorithms import ALGORITHMS
from shared.recipe.sampling import Algorithm


class Network(Protocol):
    """Computes velocities of the policy that is trained, and of the base model that it began as."""

    def velocity(self, latents: Tensor, sigma: Tensor, conditions: Conditions) -> Tensor:
        """Returns velocities (B, ...) from latents (B, ...) and sigma (B,), with the gradient."""

    def old_velocity(self, latents: Tensor, sigma: Tensor, conditions: Conditions) -> Tensor | None:
        """Returns velocities (B, ...) of the policy that generated, without gradient, if the one
        that is trained is another one; None if both are the same."""

    @property
    def has_start(self) -> bool:
        """Whether the policy at the start of the batch is kept, and the trained one has moved."""

    def start_velocity(self, latents: Tensor, sigma: Tensor, conditions: Conditions) -> Tensor:
        """Returns velocities (B, ...) of the policy at the start of the batch, without gradient."""

    def reference_velocity(self, latents: Tensor, sigma: Tensor, conditions: Conditions) -> Tensor:
        """Returns velocities (B, ...) of the network without its adapter, and without gradient."""


@dataclass(frozen=True, slots=True)
class Behaviour:
    """Known properties of the policy that generated some rows."""

    on_policy: bool
    """Whether it is the version whose weights are in use."""
    largest_weight: float | None = None
    """Largest weight of a row, if it may have computed with other weights than the trainer's own
    of that version (`Tables.largest_weight`)."""


@dataclass(frozen=True, slots=True)
class LossTerms:
    """The parts of a loss per row, which add up: the surrogate's, the constant one, and kl_beta
    times the divergence."""

    surrogate: Surrogate
    """Its loss per row is in proportion to the row's advantage, as long as that keeps its sign."""
    divergence: Tensor | None = None
    """(B,) divergence from the base model, if the algorithm holds the policy near it."""
    constant: Tensor | None = None
    """(B,) what does not depend on the advantage, if there is more than the divergence."""

    def rest(self, kl_beta: float) -> Tensor | None:
        """Returns the loss (B,) that does not depend on the advantage, if there is any."""
        if self.divergence is None:
            return self.constant
        penalty = kl_beta * self.divergence
        return penalty if self.constant is None else self.constant + penalty


def clipped(
    algorithm: Algorithm, rows: TransitionRows, network: Network, behaviour: Behaviour
) -> LossTerms:
    """Returns PPO's loss of the steps that were taken: Flow-GRPO, CPS, DanceGRPO, MixGRPO."""
    step = _taken(rows, network.velocity)
    old, advantage = _like(rows.behaviour_log_prob, step), _like(rows.advantage, step)
    proximal = _taken(rows, network.start_velocity).log_prob if network.has_start else None
    surrogate = _surrogate(algorithm, behaviour, proximal)(
        step.log_prob, old, advantage,
        clip_range=algorithm.clip_range, advantage_clip=algorithm.advantage_clip,
    )  # fmt: skip
    return LossTerms(surrogate, _divergence(algorithm, rows, step, network))


def _surrogate(
    algorithm: Algorithm, behaviour: Behaviour, proximal: Tensor | None
) -> Callable[..., Surrogate]:
    """Returns the loss of steps by their current log-prob, the stored one and the advantage;
    ``proximal``: their log-prob at the start of the batch, if that is another.

    The cap of stale rows is 1 + weight_cap x clip_range. The constant of 2 that language models
    are trained with is for log-probs of tokens; ours are means over a sample's elements, where a
    whole optimizer step moves a ratio by 1e-5 to 1e-3, and 2 would never bind. The clip range is on
    that scale. Ratios to quantised weights are further from 1, and have a cap of their own.
    """
    if behaviour.largest_weight is not None:
        largest = behaviour.largest_weight
        return partial(decoupled_surrogate, largest_weight=largest, proximal_log_prob=proximal)
    if behaviour.on_policy:
        return onpolicy_surrogate
    if algorithm.stale_loss == "decoupled":
        cap = 1 + algorithm.weight_cap * algorithm.clip_range
        return partial(decoupled_surrogate, largest_weight=cap, proximal_log_prob=proximal)
    return clipped_surrogate


def guarded(
    algorithm: Algorithm, rows: TransitionRows, network: Network, behaviour: Behaviour
) -> LossTerms:
    """Returns the loss of GRPO-Guard."""
    step = _taken(rows, network.velocity)
    assert rows.behaviour_mean is not None  # read_paths has looked
    surrogate = guarded_surrogate(
        step,
        _like(rows.behaviour_log_prob, step),
        rows.behaviour_mean.to(step.mean),
        _like(rows.advantage, step),
        clip_range=algorithm.clip_range,
        advantage_clip=algorithm.advantage_clip,
        on_policy=behaviour.on_policy,
    )
    return LossTerms(surrogate, _divergence(algorithm, rows, step, network))


def nft(
    algorithm: Algorithm, rows: NoisedSamples, network: Network, behaviour: Behaviour
) -> LossTerms:
    """Returns the loss of DiffusionNFT: supervised, on finished samples, towards good ones and away
    from bad ones. It has no ratio, for any generating policy."""
    inputs = rows.noised, rows.sigma, rows.conditions
    old = network.old_velocity(*inputs)
    velocity = network.velocity(*inputs)
    terms = branches(
        velocity, velocity.detach() if old is None else old, rows, beta=algorithm.nft_beta,
        advantage_clip=algorithm.advantage_clip,
    )  # fmt: skip
    divergence = None
    if algorithm.kl_beta:
        reference = network.reference_velocity(*inputs)
        divergence = ((velocity - reference) ** 2).flatten(1).mean(1)
    return LossTerms(terms.surrogate, divergence, terms.constant)


def evaluate(algorithm: Algorithm, rows: Any, network: Network, behaviour: Behaviour) -> LossTerms:
    """Returns the loss of rows that are the algorithm's."""
    objective: Callable[..., LossTerms] = resolve_name(ALGORITHMS[algorithm.name].objective)
    return objective(algorithm, rows, network, behaviour)


def _taken(
    rows: TransitionRows, velocity: Callable[[Tensor, Tensor, Conditions], Tensor]
) -> Transition:
    return transition(
        rows.velocities(velocity), rows.of_rows(rows.before), rows.step, arrived=rows.arrived
    )


def _divergence(
    algorithm: Algorithm, rows: TransitionRows, step: Transition, network: Network
) -> Tensor | None:
    if not algorithm.kl_beta:
        return None
    return reference_kl(step, _taken(rows, network.reference_velocity).mean)


def _like(values: Tensor, step: Transition) -> Tensor:
    return values.to(step.log_prob)
