"""Capacity of devices: the model in a role, samples of a fragment, rows of a training pass."""

import math

from services.scheduler.costs.profile import Profile, Role, device
from shared.recipe.schedule import Schedule

TARGET_ROWS = 8
"""Rows of a training pass for which a member reserves memory. The planner searches for a remedy if
fewer rows fit."""


def training_role(schedule: Schedule) -> Role:
    """Return the role of the devices that train; a member that generates needs the whole model."""
    return "member" if schedule.trainer_generates else "trainer"


def fits(profile: Profile, kind: str, role: Role) -> str | None:
    """Return why a device of this kind cannot hold the model in this role; None if it can."""
    needed = _needed_gib(profile, kind, role)
    available = device(profile, kind).memory_gib
    if needed <= available * profile.memory_share:
        return None
    role_text = "device that generates and trains" if role == "member" else f"{role} device"
    reason = f"{profile.name} needs {needed:.4g} GiB on a {role_text}; {kind} has {available:g} GiB"
    return reason if needed > available else f"{reason}, of which {profile.memory_share:.0%} count"


def _needed_gib(profile: Profile, kind: str, role: Role) -> float:
    rollout, variant = profile.rollout.memory_gib, profile.variant
    if role == "rollout":
        return profile.streaming[kind].memory_gib if kind in profile.streaming else rollout
    if role == "trainer":
        return variant.memory_gib
    return variant.member_gib or max(rollout, variant.memory_gib)


def holds_fragments(profile: Profile, kind: str, role: Role, samples: int) -> bool:
    """Return whether a device of this kind can denoise this number of samples at a time."""
    held_gib, at_once = profile.rollout.held_gib, samples
    if role == "member":
        held_gib += profile.variant.training_gib
        at_once = math.ceil(samples / profile.variant.ranks)
    elif kind in profile.streaming:
        held_gib = profile.streaming[kind].held_gib
    needed = held_gib + at_once * profile.rollout.sample_gib
    return needed <= device(profile, kind).memory_gib * profile.memory_share


def pass_rows(profile: Profile, kind: str, role: Role) -> int:
    """Return the rows of a training pass on a device of this kind: the largest number that a
    trainer can choose and that fits, limited to the rows of a group."""
    variant, max_rows = profile.variant, profile.shape.group_size
    if not variant.row_gib:
        return max_rows
    return min(max_rows, chosen_rows(profile, fitting_rows(profile, kind, role)))


def fitting_rows(profile: Profile, kind: str, role: Role) -> int:
    """Return the number of rows of a training pass that fit on a device; at least one."""
    variant, available = profile.variant, device(profile, kind).memory_gib
    fixed = variant.member_pass_gib if role == "member" else variant.pass_gib
    return max(1, int((available * profile.memory_share - fixed) / variant.row_gib))


def chosen_rows(profile: Profile, fitting: int) -> int:
    """Return the rows that a trainer chooses: it halves the rows of a group until they fit."""
    sizes = profile.variant.pass_sizes or (fitting,)
    return max((size for size in sizes if size <= fitting), default=min(sizes))
