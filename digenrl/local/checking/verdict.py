"""Judges in one sentence whether a recipe can run, on this machine or on named devices."""

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from digenrl.local.checking.preflight import check_machine, disk_bytes
from digenrl.local.processes.gpus import visible_cards
from digenrl.planning.forecast import Forecast
from digenrl.planning.ledger import Card
from services.scheduler.costs.profile import Profile
from shared.errors import UserError
from shared.recipe.recipe import Recipe

PART = re.compile(r"\d+g\.\d+gb$")
"""Size of a slice, at the end of its kind."""


@dataclass(frozen=True, slots=True)
class Verdict:
    can_run: bool
    sentence: str


def verdict_here(recipe: Recipe, runs: Path, expected: Forecast | None) -> Verdict:
    """Judge whether `digenrl up` can run a recipe on this machine.

    Args:
        expected: forecast for this machine's GPUs, where there is one.
    """
    try:
        check_machine(recipe, runs, disk_bytes(recipe))
    except UserError as error:
        reasons = "; ".join(str(error).splitlines())
        return Verdict(False, f"this cannot run here: {reasons}")
    if recipe.model.device == "cpu":
        return Verdict(True, "this can run here: on the CPU")
    cards = visible_cards()
    kinds = Counter(card.kind for card in cards if card.kind)
    names = ", ".join(f"{number} x {kind}" for kind, number in kinds.items())
    where = names or f"{len(cards)} GPUs"
    return Verdict(True, f"this can run here: on {where}{_figures(expected)}")


def verdict_on(devices: str, expected: Forecast) -> Verdict:
    """Judge a recipe on named devices, for which it has a forecast: too few or too small ones have
    none."""
    return Verdict(True, f"this can run on {devices}{_figures(expected)}")


def _figures(expected: Forecast | None) -> str:
    """Return the step time, and the memory of the device that has the least left."""
    if expected is None:
        return "; no cost profile fits, so that the step time is unknown: --trace counts the memory"
    shown = [] if expected.step_seconds is None else [f"{expected.step_seconds:.0f} s per step"]
    memory = [
        (need.needed.total, expected.profile.devices[kind].memory_gib)
        for need in expected.needs
        for kind in need.pool
    ]
    if memory:
        used, memory_gib = max(memory, key=lambda pair: pair[0] / pair[1])
        shown.append(f"{used:.0f} of {memory_gib:.0f} GiB")
    return f": {', '.join(shown)}" if shown else ""


def gpu_kinds(cards: Iterable[Card], profile: Profile) -> str | None:
    """Return GPUs by kind, as `--devices` takes them; None if a profile lacks one.

    The kind is the longest of the profile's whose letters and digits are in the name: "l40s", not
    "l40", for "NVIDIA L40S". A slice of a GPU is one of its memory, and of unknown speed.
    """
    counts: Counter[str] = Counter()
    for card in cards:
        plain = re.sub(r"[^a-z0-9]", "", card.kind.lower())
        kinds = [
            kind for kind in profile.devices if re.sub(r"[^a-z0-9]", "", kind.lower()) in plain
        ]
        if not kinds:
            return None
        kind, part = max(kinds, key=len), PART.search(card.kind)
        counts[f"{kind}-{part[0]}={card.gib:.1f}GiB*" if part else f"{kind}="] += 1
    return ",".join(f"{kind}{number}" for kind, number in counts.items()) or None
