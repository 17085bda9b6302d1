"""What the bench compares: the baseline, each choice alone, and choices together.

A choice is a set of recipe keys and nothing else, so that whoever likes one can type it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

KEPT = ("reward_mean", "kl", "grad_norm", "clip_fraction_low", "clip_fraction_high")
"""Metrics of each step that results hold."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    name: str
    title: str
    """What it changes, for the table."""
    changes: Mapping[str, Any]
    """Keys of the recipe, "table.key", and their values."""
    steps: int = 30
    seeds: tuple[int, ...] = (0, 1, 2, 3, 4)
    is_main: bool = False
    """Whether `make bench-learning` runs it without --all."""
    stops: bool = False
    """Whether a run ends at the second evaluation in a row at the goal. Its last figures are of
    that moment, which flatters them; the table marks it."""
    kept: tuple[str, ...] = KEPT
    tasks: tuple[str, ...] = ("digits", "small-files")
    """Tasks that it is for."""


NOTHING = Choice(name="nothing", title="the recipe as it is", changes={})


def lr(rate: float, decay_steps: int = 30) -> dict[str, Any]:
    return {"trainer.learning_rate": rate, "trainer.decay_steps": decay_steps}


def window(size: int, first: int = 0, last: int = 2) -> dict[str, Any]:
    return {"sampling.window": size, "sampling.first_window_starts": [first, last]}


def groups(number: int, size: int) -> dict[str, Any]:
    return {
        "batch.groups": number, "batch.group_size": size,
        "schedule.fragment_size": size, "trainer.micro_batch": size,
    }  # fmt: skip


def grid(*sigmas: float) -> dict[str, Any]:
    return {"sampling.sigmas": list(sigmas), "sampling.steps": len(sigmas) - 1}


SHARED = {"sampling.shared_noise": True}
COARSE_TAIL = grid(1, 0.9, 0.8, 0.7, 0.5, 0.25, 0)
"""The steps in which windows of 1 at 0..2 lie as they were, and three long ones after them."""
NO_SHARED = window(1) | COARSE_TAIL | lr(6e-3)
KL = "algorithm.kl_beta"
ONE_UPDATE = SHARED | window(1) | COARSE_TAIL | groups(12, 20) | {KL: 2.5} | lr(6e-3, 26)
WINDOW_1 = ONE_UPDATE | {"trainer.updates": 2}
WINDOW_1_STEPS = 20
"""After ten of them single digits begin to drift, which their mean does not show."""
WINDOW_2 = window(2) | grid(1, 0.9, 0.8, 0.7, 0.6, 0.3, 0)
FIVE = WINDOW_1 | window(1, 1, 2) | grid(1, 0.9, 0.8, 0.7, 0.35, 0) | groups(20, 14) | {KL: 3.0}
BEST = WINDOW_1 | window(1, 0, 1) | grid(1, 0.9, 0.8, 0.4, 0) | groups(20, 14) | {KL: 4.5}
"""What the demo does, seed for seed."""
BEST_STEPS = 14

SINGLE = tuple(
    Choice(name=name, title=title, changes=changes, stops=True)
    for name, title, changes in (
        ("lr-6e-3", "learning rate 6e-3", lr(6e-3)),
        ("lr-1.2e-2", "learning rate 1.2e-2", lr(1.2e-2)),
        ("window-1", "window 1", window(1)),
        ("tail", "coarse tail, window 3", grid(1, 0.9, 0.8, 0.7, 0.6, 0.5, 0.25, 0)),
        ("updates-2", "two updates", {"trainer.updates": 2}),
        ("kl-0", "KL 0", {"algorithm.kl_beta": 0.0}),
        ("kl-2.5", "KL 2.5", {"algorithm.kl_beta": 2.5}),
        ("groups-20x12", "20 groups of 12", groups(20, 12)),
        ("one-step", "one-step (staleness 1)", {"schedule.max_staleness": 1}),
        ("ema", "moving average 0.99", {"trainer.ema": 0.99}),
    )
)
BASELINE_CLIP = {"algorithm.clip_range": 2e-3}
BASELINE_LOSS = BASELINE_CLIP | {KL: 1.0}
"""Values of the baseline that some algorithms are compared with, and that their names do not imply.
"""
ALGORITHMS = tuple(
    Choice(name=name, title=title, changes=changes | lr(6e-3), stops=True)
    for name, title, changes in (
        ("guard", "grpo-guard, KL 1", {"algorithm.name": "grpo-guard"} | BASELINE_LOSS),
        ("cps", "cps, noise 0.7, KL 1", {"algorithm.name": "cps", "sampling.variant": "cps",
                                        "sampling.noise_level": 0.7} | BASELINE_LOSS),
        ("dance", "dance-grpo", {"algorithm.name": "dance-grpo", "sampling.variant": "dance",
                                 "sampling.first_window_starts": [0, 0]}),
        ("mix", "mix-grpo, KL 1", {"algorithm.name": "mix-grpo", "sampling.window_batches": 1,
                                   "sampling.first_window_starts": [0, 6]} | BASELINE_LOSS),
        ("fast", "flow-grpo-fast, KL 1", {"algorithm.name": "flow-grpo-fast", "sampling.window": 2,
                                          "sampling.first_window_starts": [0, 3]} | BASELINE_LOSS),
    )
)  # fmt: skip
_NFT = {"algorithm.name": "diffusion-nft", "algorithm.advantage_std": "group"}
NFT = (
    Choice(
        name="nft", title="diffusion-nft, decay 0, KL 1e-3", stops=True,
        changes=_NFT | {"algorithm.nft_decay": 0, "algorithm.kl_beta": 1e-3} | lr(6e-3),
    ),
    *(
        # Two optimizer steps per batch: decay 2 begins after 75 of them.
        Choice(
            name=f"nft-decay-{kind}", title=f"diffusion-nft, decay {kind}", steps=60,
            changes=_NFT | {"algorithm.nft_decay": kind, "trainer.updates": 2} | lr(3e-3, 60),
            seeds=(0, 1, 2),
        )
        for kind in (0, 1, 2)
    ),
)  # fmt: skip

CHAIN = (
    Choice(name="shared", title="shared noise", changes=SHARED, stops=True),
    Choice(name="shared-lr", title="shared noise, lr 6e-3", changes=SHARED | lr(6e-3), stops=True),
    Choice(
        name="shared-tail-2", title="shared noise, lr 6e-3, window 2, tail",
        changes=SHARED | lr(6e-3) | WINDOW_2, stops=True,
    ),
    Choice(
        name="shared-tail-1", title="shared noise, lr 6e-3, window 1, tail",
        changes=SHARED | NO_SHARED, stops=True,
    ),
)  # fmt: skip


def _near(name: str, title: str, changes: dict[str, Any], **more: Any) -> Choice:
    """Returns the best choice with a window of one step, but for some keys."""
    return Choice(
        name=f"best-{name}",
        title=f"window 1 at 0..2, {title}",
        changes=WINDOW_1 | changes,
        steps=WINDOW_1_STEPS,
        **more,
    )


NEAR = (
    Choice(
        name="best-five",
        title="window 1 at 1..2, five steps, KL 3: the demo before",
        changes=FIVE,
        steps=12,
        is_main=True,
    ),
    Choice(
        name="best-window-2",
        title="window 2 at 0..2, KL 2.5: the demo before that",
        changes=WINDOW_1 | WINDOW_2,
        steps=12,
        is_main=True,
    ),
    Choice(
        name="best-window-1",
        title="window 1 at 0..2, KL 2.5, 20 steps",
        changes=WINDOW_1,
        steps=WINDOW_1_STEPS,
        is_main=True,
    ),
    _near("1-update", "one update", {"trainer.updates": 1}),
    _near("kl-1", "KL 1", {KL: 1.0}),
    _near("kl-5", "KL 5", {KL: 5.0}),
    _near("lr-3e-3", "lr 3e-3", lr(3e-3, 26)),
    _near("lr-1e-2", "lr 1e-2", lr(1e-2, 26)),
    _near("not-shared", "noise not shared", {"sampling.shared_noise": False}),
    _near("no-tail", "ten equal steps", {"sampling.sigmas": "linear", "sampling.steps": 10}),
    _near("20x12", "20 groups of 12", groups(20, 12)),
    _near("10x24", "10 groups of 24", groups(10, 24)),
    _near("one-step", "one-step", {"schedule.max_staleness": 1}),
    _near("one-step-lr-3e-3", "one-step, lr 3e-3", {"schedule.max_staleness": 1} | lr(3e-3, 26)),
    _near("guard", "grpo-guard", {"algorithm.name": "grpo-guard"} | BASELINE_CLIP),
    _near("ema", "moving average 0.99", {"trainer.ema": 0.99}),
)
_AWM = {
    "algorithm.name": "awm", "algorithm.kl_beta": 1e-3, "algorithm.advantage_std": "group",
}  # fmt: skip
MATCHING = (
    Choice(name="awm", title="awm", stops=True, changes=_AWM | lr(6e-3)),
    Choice(
        name="awm-clip-1", title="awm, A clipped at 1", stops=True,
        changes=_AWM | {"algorithm.advantage_clip": 1.0} | lr(6e-3),
    ),
    Choice(
        name="dpo", title="dpo, beta 20", stops=True,
        changes={"algorithm.name": "dpo", "algorithm.dpo_beta": 20.0, "trainer.micro_batch": 1,
                 "algorithm.kl_beta": 0.0} | lr(6e-3),
    ),
)  # fmt: skip

SWEPT = (0, 1, 2)
"""Seeds of the sweeps."""


def _swept(choice: Choice, name: str, title: str, changes: dict[str, Any]) -> Choice:
    """Returns a choice with another learning rate or weight of the KL."""
    before = choice.title.removesuffix(", KL 1") if KL in changes else choice.title
    return replace(
        choice, name=f"{choice.name}-{name}", title=f"{before}, {title}",
        changes={**choice.changes, **changes}, seeds=SWEPT,
    )  # fmt: skip


SWEEPS = tuple(
    _swept(choice, name, title, changes)
    for choice, weights in (
        (next(each for each in ALGORITHMS if each.name == "fast"), (0.0, 2.5)),
        (next(each for each in MATCHING if each.name == "awm-clip-1"), (0.0, 1e-2)),
    )
    for name, title, changes in (
        ("lr-3e-3", "lr 3e-3", lr(3e-3)),
        ("lr-1.2e-2", "lr 1.2e-2", lr(1.2e-2)),
        *((f"kl-{weight:g}", f"KL {weight:g}", {KL: weight}) for weight in weights),
    )
)
"""Learning rates and KL weights of the algorithms that learn fastest after the best choice, whose
own stand in `NEAR`."""

ROUNDED = tuple(
    Choice(
        name=f"exchange-{updates}-{level}",
        title=f"{updates} updates, weights and sums of two sites {level}",
        changes=BEST | {"trainer.updates": updates, "exchange.down": level, "exchange.up": level},
        steps=BEST_STEPS if updates > 1 else 20,
        tasks=("digits",),
    )
    for level in ("exact", "int8", "int4")
    for updates in (2, 1)
)
"""Effect of rounding on learning (docs/far-apart.md)."""

CHOICES: tuple[Choice, ...] = (
    Choice(name="base", title="baseline: the demo until 2026-11", changes={}, is_main=True),
    *SINGLE,
    *CHAIN,
    Choice(
        name="not-shared", title="window 1, tail, lr 6e-3, KL 1", changes=NO_SHARED, stops=True
    ),
    *ALGORITHMS,
    *NFT,
    *MATCHING,
    *SWEEPS,
    Choice(
        name="best", title="**best: the demo**", changes=BEST, steps=BEST_STEPS, is_main=True
    ),
    *NEAR,
    *ROUNDED,
)  # fmt: skip
BY_NAME = {choice.name: choice for choice in CHOICES}
