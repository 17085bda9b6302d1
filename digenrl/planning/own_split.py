"""The split that a recipe itself asks for, on given devices."""

from collections.abc import Callable
from dataclasses import dataclass

from services.scheduler.costs.capacity import fits, training_role
from services.scheduler.costs.profile import Profile, Role
from services.scheduler.costs.split import Devices, Split, words
from shared.errors import UserError
from shared.recipe.recipe import Recipe
from shared.recipe.schedule import RunSchedule

Remedy = Callable[[str, Role], str]
"""Explains how a kind of device would fit a role; empty if that is unknown."""


@dataclass(frozen=True, slots=True)
class OwnSplit:
    split: Split
    schedule: RunSchedule
    """Open values of the recipe are decided during the run, and so in its simulation."""


def own_split(recipe: Recipe, profile: Profile, devices: Devices, *, remedy: Remedy) -> OwnSplit:
    """Chooses which devices train, those first that train fastest, of any kinds that can; and which
    generate. A shard group has devices of one kind.

    Raises:
        UserError: if there are too few, or they do not hold what they are to hold, with the
            remedy.
    """
    _check_number(recipe, devices)
    wanted, size = recipe.trainer.devices, recipe.trainer.shard_devices
    role = training_role(recipe.run_schedule)
    chosen = _fastest(profile, devices, wanted, role, size)
    if sum(chosen.values()) < wanted:
        small = [k for k, count in devices.items() if count and fits(profile, k, role)]
        if not small:
            raise UserError(
                f"trainer.shard_devices: {size} of one kind form a group, and {words(devices)} are "
                f"no {wanted // size} groups"
            )
        kind = max(small, key=lambda kind: profile.devices[kind].memory_gib)
        reason = fits(profile, kind, role)
        raise UserError(
            f"trainer.devices: {wanted} are to train; {reason}{_and(remedy(kind, role))}"
        )
    left = {kind: count - chosen.get(kind, 0) for kind, count in devices.items()}
    return OwnSplit(Split(_rollout(recipe, profile, left, remedy), chosen), recipe.run_schedule)


def _check_number(recipe: Recipe, devices: Devices) -> None:
    workers, trains = recipe.rollout.workers, recipe.trainer.devices
    if workers + trains > sum(devices.values()):
        raise UserError(
            f"--devices: {words(devices)} are {sum(devices.values())}; the recipe wants "
            f"{workers + trains}: trainer.devices = {trains} and rollout.workers = {workers}"
        )


def _rollout(recipe: Recipe, profile: Profile, devices: Devices, remedy: Remedy) -> Devices:
    wanted = recipe.rollout.workers
    chosen = _fastest(profile, devices, wanted, "rollout")
    if sum(chosen.values()) < wanted:
        kind, reason = next(
            (kind, reason)
            for kind, count in devices.items()
            if count and (reason := fits(profile, kind, "rollout")) is not None
        )
        fit = _and(remedy(kind, "rollout"))
        raise UserError(f"rollout.workers: {wanted} are to generate; {reason}{fit}")
    return chosen


def _fastest(profile: Profile, devices: Devices, wanted: int, role: Role, size: int = 1) -> Devices:
    """Return the ``wanted`` number of devices that can take a role, in groups of ``size``; fewer if
    there are no more. Kinds that cannot generate come first, then the fastest kinds."""
    speed = "generation_speed" if role == "rollout" else "training_speed"
    chosen = dict[str, int]()
    able = [kind for kind in devices if fits(profile, kind, role) is None]

    def order(kind: str) -> tuple[bool, float]:
        return fits(profile, kind, "rollout") is None, -getattr(profile.devices[kind], speed)

    for kind in sorted(able, key=order):
        number = min(devices[kind], wanted - sum(chosen.values()))
        if number >= size:
            chosen[kind] = number - number % size
    return chosen


def _and(remedy: str) -> str:
    return f"; {remedy}" if remedy else ""
