"""Ways to split devices between rollout and trainer, by comparative advantage.

The bound of a batch is a linear program with two tasks: kinds in descending order of generation
over training speed, those in front generate, those behind train, and one kind does both
(`costs.floor`). So one kind is split and the others go wholly to one side. Kinds of the same
advantage are ordered by speed, slow ones in front: a slow device that generates delays a fragment,
one that trains delays a batch.
"""

import math

from services.scheduler.costs.profile import Profile, fits, speed
from services.scheduler.costs.split import Devices, Split

MAX_PER_KIND = 64
"""Ways to split a kind; of more devices, every second, third ... way is looked at."""


def excluded(profile: Profile, devices: Devices) -> dict[str, str]:
    """Kinds that can hold the model in neither role, and why."""
    reasons = {kind: fits(profile, kind, "rollout") for kind, count in devices.items() if count}
    return {
        kind: reason
        for kind, reason in reasons.items()
        if reason is not None and fits(profile, kind, "trainer") is not None
    }


def splits(profile: Profile, devices: Devices) -> list[Split]:
    """Every split worth a look; none if a role is without a device."""
    able = [kind for kind, count in devices.items() if count and any(_speeds(profile, kind))]
    able.sort(key=lambda kind: _order(profile, kind))
    found: dict[tuple[int, ...], Split] = {}
    for index, kind in enumerate(able):
        for count in _counts(profile, kind, devices[kind]):
            numbers = [
                devices[k] if place < index else count if place == index else 0
                for place, k in enumerate(able)
            ]
            split = _split(able, numbers, devices)
            if split.rollout and split.trainer:
                found.setdefault(tuple(numbers), split)
    return list(found.values())


def fluid_splits(profile: Profile, devices: Devices) -> list[Split]:
    """Return the splits of fluid devices: kinds behind one in the order of advantage are members,
    those in front of it only generate; so are kinds that cannot be members. None is divided, as
    members divide their time themselves."""
    able = [kind for kind, count in devices.items() if count and any(_speeds(profile, kind))]
    able.sort(key=lambda kind: _order(profile, kind))
    may_be = [kind for kind in able if fits(profile, kind, "member") is None]
    found: list[Split] = []
    for first in range(len(may_be)):
        members = {kind: devices[kind] for kind in may_be[first:]}
        others = {
            kind: devices[kind]
            for kind in able
            if kind not in members and fits(profile, kind, "rollout") is None
        }
        found.append(Split(others, members))
    return found


def _speeds(profile: Profile, kind: str) -> tuple[float, float]:
    return speed(profile, kind, "rollout"), speed(profile, kind, "trainer")


def _order(profile: Profile, kind: str) -> tuple[float, float]:
    generates, trains = _speeds(profile, kind)
    return -generates / trains if trains else -math.inf, trains or generates


def _counts(profile: Profile, kind: str, number: int) -> range:
    """How many of a kind may generate."""
    generates, trains = _speeds(profile, kind)
    if not trains:
        return range(number, number + 1)
    if not generates:
        return range(1)
    return range(0, number + 1, -(-number // MAX_PER_KIND))


def _split(able: list[str], numbers: list[int], devices: Devices) -> Split:
    pairs = list(zip(able, numbers, strict=True))
    return Split(
        {kind: number for kind, number in pairs if number},
        {kind: devices[kind] - number for kind, number in pairs if devices[kind] - number},
    )
