"""The algorithms that a recipe chooses by name: what each is made of, and what goes with what.

An algorithm is an objective (how a sample's advantage becomes a loss) and a way of sampling (which
steps are stochastic, and how). Its name also selects the values of its paper: a recipe gets them as
defaults. `docs/algorithms/` has a page for each.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

from shared.learning.windows import WindowRule

Variant = Literal["flow", "dance", "cps"]
Starts = Literal["fixed", "half", "all"]
DecayKind = Literal[0, 1, 2]

DEFAULT = "flow-grpo"

_OBJECTIVE = "shared.diffusion.training.objective"
_MATCHING = "shared.diffusion.training.matching"
_FINISHED = "shared.diffusion.training.forward_process:FINISHED"


@dataclass(frozen=True, slots=True)
class Method:
    """One algorithm: everything that a run asks of it."""

    objective: str
    """Import string of the function that turns rows into a loss."""
    variants: tuple[Variant, ...]
    """Stochastic steps that it can be trained on; the first is the default."""
    starts: Starts = "fixed"
    """Default start of windows. fixed: at step 0; half: in the first half of the steps; all: at any
    step that fits."""
    window_rule: WindowRule = "group"
    implies: Mapping[str, Any] = field(default_factory=dict)
    """Further keys of a recipe, "table.key", and the published value of each."""
    rows: str = "shared.diffusion.training.group:PATHS"
    """Import string of the `RowKind`: what rollout stores of samples, and how it is trained."""
    has_window: bool = True
    """Whether the window's steps are stochastic; without it, samples are made by ODE."""
    keeps_means: bool = False
    """Whether the means of the stochastic steps are stored as well."""
    has_ratio: bool = True
    """Whether its loss has a ratio to the policy that generated."""
    corrects_staleness: bool = False
    """Whether a weight per row corrects for samples of another policy: for stale samples
    (`algorithm.stale_loss = "decoupled"`) and for samples of `rollout.weights`."""
    pairs: bool = False
    """Whether a group is trained as one pair, its best and its worst sample."""
    needs_base: bool = False
    """Whether its loss compares the network with the reference, independent of
    `algorithm.kl_beta`."""
    has_old_policy: bool = False
    """Whether a moving average of the trained policy generates the samples, and is part of the loss
    (`old_policy_decay`). Only of an algorithm without a ratio."""


_POLICY_GRADIENT: tuple[Variant, ...] = ("flow", "dance", "cps")


_clipped = partial(Method, f"{_OBJECTIVE}:clipped", corrects_staleness=True)


def _published(noise_level: float, clip_range: float, **sampling: Any) -> dict[str, Any]:
    noise_and_clip = {"sampling.noise_level": noise_level, "algorithm.clip_range": clip_range}
    return noise_and_clip | {f"sampling.{key}": value for key, value in sampling.items()}


_NO_KL = {"algorithm.kl_beta": 0.0}
_DROPPED = {"algorithm.zero_advantages": "dropped"}
_FAST = _published(0.8, 1e-5) | _DROPPED

ALGORITHMS: Mapping[str, Method] = {
    "flow-grpo": _clipped(_POLICY_GRADIENT, implies=_published(0.7, 1e-4) | _DROPPED),
    "flow-grpo-fast": _clipped(_POLICY_GRADIENT, implies=_FAST, starts="half"),
    "cps": _clipped(("cps",), implies=_FAST),
    "dance-grpo": _clipped(
        ("dance",),
        implies=_published(0.3, 1e-4, shared_noise=True, stochastic="all", trained="random")
        | _NO_KL,
    ),
    "mix-grpo": _clipped(
        _POLICY_GRADIENT, starts="all", window_rule="progressive",
        implies=_published(0.7, 1e-4, window_stride=1, roll_back=True, shared_noise=True) | _NO_KL,
    ),
    # The log-prob of cps has no scale that the ratio could be freed of.
    "grpo-guard": Method(
        f"{_OBJECTIVE}:guarded", ("flow", "dance"), keeps_means=True,
        implies=_published(0.7, 2e-6) | _DROPPED,
    ),
    "diffusion-nft": Method(
        f"{_OBJECTIVE}:nft", _POLICY_GRADIENT,
        rows=_FINISHED, has_window=False,
        has_ratio=False, has_old_policy=True,
        implies={
            "algorithm.kl_beta": 1e-4, "algorithm.nft_beta": 1.0, "algorithm.nft_decay": 1,
            "algorithm.advantage_std": "batch",
        },
    ),
    "awm": Method(
        f"{_MATCHING}:awm", _POLICY_GRADIENT, rows=_FINISHED, has_window=False, has_ratio=False,
        implies={
            "algorithm.kl_beta": 1e-4, "algorithm.advantage_clip": 5.0,
            "algorithm.advantage_std": "batch",
        },
    ),
    "dpo": Method(
        f"{_MATCHING}:dpo", _POLICY_GRADIENT, rows=f"{_MATCHING}:PAIRS", has_window=False,
        has_ratio=False, pairs=True, needs_base=True,
    ),
}  # fmt: skip


def old_policy_decay(kind: DecayKind, steps: int) -> float:
    """Return the decay d of the old policy after this many optimizer steps of the run: after each
    batch, old <- d old + (1 - d) trained. DiffusionNFT's published types: 0, without memory; 1,
    min(.001 steps, .5); 2, 0 for 75 steps and then min(.0075 (steps - 75), .999)."""
    match kind:
        case 0:
            return 0.0
        case 1:
            return min(0.001 * steps, 0.5)
        case 2:
            return min(0.0075 * max(0, steps - 75), 0.999)
