"""Ways to split devices between rollout and trainer, by comparative advantage.

The bound of a batch is a linear program with two tasks: kinds in descending order of generation
over training speed, those in front generate, those behind train, and one kind does both
(`costs.floor`). So one kind is split and the others go wholly to one side. Kinds of the same
advantage are ordered by speed, slow ones in front: a slow device that generates delays a fragment,
one that trains delays a batch.
"""

import math

from services.scheduler.costs.capacity import fits
from services.scheduler.costs.profile import Profile
from services.scheduler.costs.seconds import speed
from services.scheduler.costs.split import Devices, Split, present

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
    ranks = profile.variant.ranks
    distinct: dict[tuple[int, ...], Split] = {}
    for index, kind in enumerate(able):
        for count in _counts(profile, kind, devices[kind]):
            numbers = [
                devices[k] if place < index else count if place == index else devices[k] % ranks
                for place, k in enumerate(able)
            ]
            split = _split(profile, able, numbers, devices)
            if split.rollout and split.trainer:
                distinct.setdefault(tuple(numbers), split)
    return list(distinct.values())


def fluid_splits(profile: Profile, devices: Devices) -> list[Split]:
    """Return the splits of fluid devices: kinds behind one in the order of advantage are members,
    those in front of it only generate; so are kinds that cannot be members. None is divided, as
    members divide their time themselves."""
    able = [kind for kind, count in devices.items() if count and any(_speeds(profile, kind))]
    able.sort(key=lambda kind: _order(profile, kind))
    may_be, ranks = [k for k in able if fits(profile, k, "member") is None], profile.variant.ranks
    all_splits: list[Split] = []
    for first in range(len(may_be)):
        members = {kind: devices[kind] // ranks * ranks for kind in may_be[first:]}
        others = {
            kind: devices[kind] - members.get(kind, 0)
            for kind in able
            if fits(profile, kind, "rollout") is None
        }
        all_splits.append(Split(present(others), present(members)))
    if ranks > 1:  # a device generates more than its part of a group does
        all_splits += [
            each for each in splits(profile, devices) if set(each.trainer) <= set(may_be)
        ]
    return [each for each in all_splits if each.trainer]


def _speeds(profile: Profile, kind: str) -> tuple[float, float]:
    return speed(profile, kind, "rollout"), speed(profile, kind, "trainer")


def _order(profile: Profile, kind: str) -> tuple[float, float]:
    generates, trains = _speeds(profile, kind)
    return -generates / trains if trains else -math.inf, trains or generates


def _counts(profile: Profile, kind: str, number: int) -> range:
    """How many of a kind may generate; the others are whole shard groups."""
    (generates, trains), ranks = _speeds(profile, kind), profile.variant.ranks
    if not trains:
        return range(number, number + 1)
    if not generates:
        return range(1)
    return range(number % ranks, number + 1, -(-number // (MAX_PER_KIND * ranks)) * ranks)


def _split(profile: Profile, able: list[str], numbers: list[int], devices: Devices) -> Split:
    pairs, ranks = list(zip(able, numbers, strict=True)), profile.variant.ranks
    trainer = {kind: (devices[kind] - number) // ranks * ranks for kind, number in pairs}
    rollout = {kind: number for kind, number in pairs if _speeds(profile, kind)[0]}
    return Split(present(rollout), present(trainer))
