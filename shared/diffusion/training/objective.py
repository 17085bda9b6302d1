"""Objectives: functions that turn rows into a loss per row (`shared.learning.algorithms`)."""

from collections.abc import Callable
from dataclasses import dataclass
from pkgutil import resolve_name
from typing import Any, Protocol

from torch import Tensor

from shared.diffusion.models import Conditions
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
from shared.diffusion.transition import Transition, transition
from shared.learning.algorithms import ALGORITHMS
from shared.recipe.sampling import Algorithm


class Network(Protocol):
    """Computes velocities of the policy that is trained, and of the base model that it began as."""

    def velocity(self, latents: Tensor, sigma: Tensor, conditions: Conditions) -> Tensor:
        """Returns velocities (B, ...) from latents (B, ...) and sigma (B,), with the gradient."""

    def reference_velocity(self, latents: Tensor, sigma: Tensor, conditions: Conditions) -> Tensor:
        """Returns velocities (B, ...) of the network without its adapter, and without gradient."""


@dataclass(frozen=True, slots=True)
class LossTerms:
    surrogate: Surrogate
    divergence: Tensor | None
    """(B,) divergence from the base model, if the algorithm holds the policy near it."""


def clipped(
    algorithm: Algorithm, rows: TransitionRows, network: Network, *, on_policy: bool
) -> LossTerms:
    """Returns PPO's loss of the steps that were taken: Flow-GRPO, CPS, DanceGRPO, MixGRPO."""
    taken = _taken(rows, network)
    old, advantage = _like(rows.behaviour_log_prob, taken), _like(rows.advantage, taken)
    limits = {"clip_range": algorithm.clip_range, "advantage_clip": algorithm.advantage_limit}
    if on_policy:
        surrogate = onpolicy_surrogate(taken.log_prob, old, advantage, **limits)
    elif algorithm.stale_loss == "decoupled":
        limits["weight_cap"] = algorithm.weight_cap
        surrogate = decoupled_surrogate(taken.log_prob, old, advantage, **limits)
    else:
        surrogate = clipped_surrogate(taken.log_prob, old, advantage, **limits)
    return LossTerms(surrogate, _divergence(algorithm, rows, taken, network))


def guarded(
    algorithm: Algorithm, rows: TransitionRows, network: Network, *, on_policy: bool
) -> LossTerms:
    """Returns the loss of GRPO-Guard."""
    taken = _taken(rows, network)
    assert rows.behaviour_mean is not None  # read_paths has looked
    surrogate = guarded_surrogate(
        taken,
        _like(rows.behaviour_log_prob, taken),
        rows.behaviour_mean.to(taken.mean),
        _like(rows.advantage, taken),
        clip_range=algorithm.clip_range,
        advantage_clip=algorithm.advantage_limit,
        on_policy=on_policy,
    )
    return LossTerms(surrogate, _divergence(algorithm, rows, taken, network))


def nft(
    algorithm: Algorithm, rows: NoisedSamples, network: Network, *, on_policy: bool
) -> LossTerms:
    """Returns the loss of DiffusionNFT without its old policy: supervised, on finished samples,
    towards good ones and away from bad ones. It has no ratio, so ``on_policy`` is not used."""
    velocity = network.velocity(rows.noised, rows.sigma, rows.conditions)
    surrogate = branches(velocity, rows, advantage_clip=algorithm.advantage_clip)
    if not algorithm.kl_beta:
        return LossTerms(surrogate, None)
    reference = network.reference_velocity(rows.noised, rows.sigma, rows.conditions)
    return LossTerms(surrogate, ((velocity - reference) ** 2).flatten(1).mean(1))


def evaluate(algorithm: Algorithm, rows: Any, network: Network, *, on_policy: bool) -> LossTerms:
    """Returns the loss of rows that are the algorithm's. ``on_policy`` says that the weights in use
    generated them."""
    objective: Callable[..., LossTerms] = resolve_name(ALGORITHMS[algorithm.name].objective)
    return objective(algorithm, rows, network, on_policy=on_policy)


def _taken(rows: TransitionRows, network: Network) -> Transition:
    velocity = network.velocity(rows.before, rows.step.sigma, rows.conditions)
    return transition(velocity, rows.before, rows.step, arrived=rows.arrived)


def _divergence(
    algorithm: Algorithm, rows: TransitionRows, taken: Transition, network: Network
) -> Tensor | None:
    if not algorithm.kl_beta:
        return None
    reference = network.reference_velocity(rows.before, rows.step.sigma, rows.conditions)
    mean = transition(reference, rows.before, rows.step, arrived=rows.arrived).mean
    return reference_kl(taken, mean)


def _like(values: Tensor, taken: Transition) -> Tensor:
    return values.to(taken.log_prob)
