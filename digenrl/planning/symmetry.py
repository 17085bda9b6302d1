"""Plans very many devices by fewer: alike devices are one class, of which a part stands for all.

With a part of the devices of each kind and as large a part of the groups, a batch takes as long as
with all of them: each device has as much to do, and waits as long for the others. An exchange of
fluid devices includes all of them, and the pieces that one message can name are divided.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from services.scheduler.costs.fluid import exchange_seconds
from services.scheduler.costs.profile import Profile
from services.scheduler.costs.split import Devices, Split, present
from shared.recipe.schedule import RunSchedule

MAX_PART_DEVICES = 32
"""Devices of a part at most, if the batch has enough groups."""
MIN_PART_GROUPS, MIN_SPREAD_GROUPS = 16, 4
"""Groups of a part at least: with fewer, a single group weighs too much; unless there are several
devices for each group, which is spread over them."""
DEVICES_PER_GROUP = 4
"""Number of devices for each group."""
MIN_PART_OF_KIND = 4
"""Devices of one kind in a part."""


@dataclass(frozen=True, slots=True)
class RepresentativePart:
    """Devices and groups that represent a multiple of themselves."""

    factor: int
    profile: Profile
    devices: Devices
    whole: Devices
    """All devices."""

    def whole_split(self, split: Split) -> Split:
        """Return the split of all devices that a split of the part stands for."""
        if self.factor == 1:
            return split
        rollout = {
            kind: round(split.rollout.get(kind, 0) / self.devices[kind] * self.whole[kind])
            for kind in split.devices
        }
        ranks = self.profile.variant.ranks
        trainer = {kind: (self.whole[kind] - n) // ranks * ranks for kind, n in rollout.items()}
        return Split(present(rollout), present(trainer))

    def part_of(self, schedule: RunSchedule) -> RunSchedule:
        """Return a schedule of all groups as one of the part's."""
        return _scaled(schedule, 1 / self.factor)

    def whole_schedule(self, schedule: RunSchedule) -> RunSchedule:
        """Return a schedule of the part's groups as one of all groups."""
        return _scaled(schedule, self.factor)


def part_of(profile: Profile, devices: Devices) -> RepresentativePart:
    """Return the part by which these devices are planned: all of them, if they are few."""
    given = present(devices)
    factor = _factor(profile.shape.groups, given, profile.variant.ranks)
    if factor == 1:
        return RepresentativePart(1, profile, devices, devices)
    groups = round(profile.shape.groups / factor)
    pieces = max(1, profile.shape.most_pieces // factor)
    shape = profile.shape.model_copy(update={"groups": groups, "most_pieces": pieces})
    exchange = exchange_seconds(profile, sum(given.values()))
    variant = profile.variant.model_copy(update={"exchange_seconds": exchange})
    ranks = profile.variant.ranks
    part = {kind: round(count / factor / ranks) * ranks for kind, count in given.items()}
    changed = profile.model_copy(update={"shape": shape, "variant": variant})
    return RepresentativePart(factor, changed, part, given)


def _scaled(schedule: RunSchedule, factor: float) -> RunSchedule:
    tag = schedule.fixed_tag
    if factor == 1 or not tag or schedule.mode != "disaggregated":
        return schedule
    return schedule.changed(tag=max(1, round(tag * factor)))


def _factor(groups: int, devices: Mapping[str, int], ranks: int) -> int:
    """The smallest that makes the part small enough, or a little larger one that divides evenly."""
    wanted = -(-sum(devices.values()) // MAX_PART_DEVICES)
    is_spread = sum(devices.values()) >= DEVICES_PER_GROUP * groups
    least = MIN_SPREAD_GROUPS if is_spread else MIN_PART_GROUPS
    most = min([groups // least, *(n // (MIN_PART_OF_KIND * ranks) for n in devices.values())])
    if most < 2 or wanted < 2:
        return 1
    if wanted >= most:
        return most
    near = range(wanted, min(most, wanted * 3 // 2) + 1)
    return next((n for n in near if not any(c % n for c in (groups, *devices.values()))), wanted)
