"""What makes a model fit a device that is too small for it as it is, as keys of a recipe.

Remedies are tried from what changes no result to what changes some:

fragments    fewer samples at a time
encoder      prompts are encoded by a process of its own, so that no device that generates holds
             the text encoders: the same bytes
tiles        videos are decoded in tiles
streamed     the network's blocks come from the host's memory, one after the other: the same
             weights, and no faster than PCIe
int8         the network is quantised on rollout devices, and what that changes is weighted

and for a device that trains, not to be lent, and to share the weights in a shard group.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from digenrl.planning.runnable import as_toml
from digenrl.trace.memory import (
    MEMORY_SHARE,
    Needed,
    Use,
    member_needs,
    rollout_needs,
    trainer_needs,
)
from services.scheduler.costs.profile import Profile, Role, device

SHARD_DEVICES = (2, 4, 8)
"""Sizes of shard groups that are tried."""


def would_fit(profile: Profile, use: Use, kind: str, role: Role) -> str:
    """Return what would make the model fit this kind of device in this role, in a few words; empty
    if the profile does not know."""
    if profile.memory is None:
        return ""
    needs = {"rollout": rollout_needs, "trainer": trainer_needs, "member": member_needs}[role]
    has = device(profile, kind).memory_gib
    least: Needed | None = None
    tried = {"rollout": generating(use), "trainer": _training(use), "member": _fluid(use)}
    for each in tried[role]:
        needed = (member_needs if each.ranks > 1 else needs)(profile.memory, each)
        if needed.total <= has * MEMORY_SHARE:
            return f"it would take {needed.total:.3g} GiB with {as_toml(keys(use, each))}"
        if least is None or needed.total < least.total:
            least = needed
    if least is None:
        return ""
    return f"no key makes it fit, {least.total:.3g} GiB are the least"


def generating(use: Use) -> Iterator[Use]:
    """Yield the uses that take less of a device that generates than ``use`` does."""
    apart = replace(use, encodes=False)
    if use.fragment > 1:
        yield replace(use, fragment=1)
    yield apart
    yield replace(apart, tiles=True)
    if not use.rank or use.streams or use.weights is not None:
        return
    quantised = (replace(apart, weights="int8"),) if use.can_weigh else ()
    for held in (replace(apart, streams=True), *quantised):
        yield held
        yield replace(held, tiles=True)


def _training(use: Use) -> Iterator[Use]:
    """Yield the uses that take less of a device that trains than ``use`` does."""
    if use.helps:
        yield from _generating_and_training(use)
        yield replace(use, helps=False)
    yield from _sharing(use)


def _fluid(use: Use) -> Iterator[Use]:
    """Yield the uses that take less of a fluid device than ``use`` does."""
    yield from _generating_and_training(use)
    yield from _sharing(use)


def _generating_and_training(use: Use) -> Iterator[Use]:
    apart = replace(use, encodes=False)
    yield from (replace(use, fragment=1), apart, replace(apart, tiles=True))


def _sharing(use: Use) -> Iterator[Use]:
    """Yield the uses of larger shard groups, which do not generate."""
    yield from (replace(use, ranks=size) for size in SHARD_DEVICES if size > use.ranks)


def keys(before: Use, after: Use) -> dict[str, Any]:
    """Return what to write into a recipe for one use in place of another."""
    known = _keys(before)
    return {key: value for key, value in _keys(after).items() if value != known[key]}


def _keys(use: Use) -> dict[str, Any]:
    return {
        "schedule.fragment_size": use.fragment,
        "encoder.workers": int(not use.encodes),
        "model.vae_tiling": use.tiles,
        "rollout.memory": "streamed" if use.streams else "resident",
        "rollout.weights": use.weights,
        "schedule.tag": "auto" if use.helps else "off",
        "schedule.mode": "fluid" if use.ranks > 1 else None,
        "trainer.devices": use.ranks,
        "trainer.shard_devices": use.ranks,
    }
