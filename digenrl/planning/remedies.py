"""Recipe keys that make a model fit a device that is too small for it.

Remedies are tried from what changes no result to what changes some:

fragments    fewer samples at a time
encoder      prompts are encoded by a process of its own, so that no device that generates holds
             the text encoders: the same bytes
tiles        videos are decoded in tiles
streamed     the network's blocks come from the host's memory, one after the other: the same
             weights, and no faster than PCIe
int8         the network is quantised on rollout devices, and what that changes is weighted

and for a device that trains, not to generate, to share the weights in a shard group, to train an
adapter on a network that is quantised, and to stream the network's blocks.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from digenrl.planning.runnable import as_toml
from digenrl.trace.memory import (
    MEMORY_SHARE,
    DeviceMemory,
    ModelUse,
    member_needs,
    rollout_needs,
    trainer_needs,
    with_memory,
)
from services.scheduler.costs.capacity import pass_rows
from services.scheduler.costs.profile import Profile, Role, device
from shared.models.memory import Quantised

ADAPTER_BASE_FORMS: tuple[Quantised, ...] = ("int8", "nf4")
"""Forms of the network under an adapter that are tried."""
SHARD_DEVICES = (2, 4, 8)
"""Sizes of shard groups that are tried."""
MEMORY_NEEDS = {"rollout": rollout_needs, "trainer": trainer_needs, "member": member_needs}
ONLY_TRAINS = {"schedule.mode": "disaggregated", "schedule.tag": "off"}
"""Keys of a recipe in which devices that train do not generate."""


def would_fit(profile: Profile, use: ModelUse, kind: str, role: Role) -> str:
    """Return what would make the model fit this kind of device in this role, in a few words; empty
    if the profile does not know."""
    if profile.memory is None:
        return ""
    has = device(profile, kind).memory_gib
    least: DeviceMemory | None = None
    for each, does in _ways(use, role):
        needed = MEMORY_NEEDS[does](profile.memory, each)
        if needed.total <= has * MEMORY_SHARE:
            remedy_keys = keys(use, each)
            remedy_keys |= ONLY_TRAINS if does != role else {}
            return f"it would take {needed.total:.3g} GiB with {as_toml(remedy_keys)}"
        if least is None or needed.total < least.total:
            least = needed
    return "" if least is None else f"no key makes it fit, {least.total:.3g} GiB are the least"


def for_rows(profile: Profile, use: ModelUse, kind: str, role: Role, rows: int) -> str:
    """Return the keys with which training passes on this kind of device have this many rows; empty
    without any."""
    for each, does in _ways(use, role):
        if does == role and pass_rows(with_memory(profile, each), kind, role) >= rows:
            return as_toml(keys(use, each))
    return ""


def _ways(use: ModelUse, role: Role) -> Iterator[tuple[ModelUse, Role]]:
    """Yield the uses that take less of a device than ``use`` does in this role; of one that
    generates and trains, also as one that only trains."""
    if role == "rollout":
        yield from ((each, role) for each in generating(use))
        return
    if role == "member":
        apart = replace(use, encodes=False)
        for each in (replace(use, fragment=1), apart, replace(apart, tiles=True)):
            yield each, role
        yield use, "trainer"
    roles: tuple[Role, ...] = ("member", "trainer") if role == "member" else ("trainer",)
    yield from ((each, does) for does in roles for each in sharing(use))
    if use.rank and use.ranks == 1:
        apart, forms = replace(use, encodes=False), ADAPTER_BASE_FORMS if use.base is None else ()
        changes = [replace(apart, base=form) for form in forms]
        if not use.trainer_streams:
            changes.append(replace(apart, streams=True, trainer_streams=True))
        yield from ((each, does) for does in roles for each in changes)
        yield from ((replace(each, fragment=1), does) for does in roles for each in changes)


def generating(use: ModelUse) -> Iterator[ModelUse]:
    """Yield the uses that take less of a device that generates than ``use`` does."""
    apart = replace(use, encodes=False)
    if use.fragment > 1:
        yield replace(use, fragment=1)
    yield apart
    yield replace(apart, tiles=True)
    if not use.rank or use.streams or use.weights is not None or use.base is not None:
        return
    quantised = (replace(apart, weights="int8"),) if use.can_weigh else ()
    for change in (replace(apart, streams=True), *quantised):
        yield change
        yield replace(change, tiles=True)


def sharing(use: ModelUse) -> Iterator[ModelUse]:
    """Yield the uses of larger shard groups, which share no quantised weights."""
    if use.base is None:
        yield from (replace(use, ranks=size) for size in SHARD_DEVICES if size > use.ranks)


def keys(before: ModelUse, after: ModelUse) -> dict[str, Any]:
    """Return what to write into a recipe for one use in place of another."""
    keys_before = _keys(before)
    changed_keys = {key: value for key, value in _keys(after).items() if value != keys_before[key]}
    if "trainer.shard_devices" in changed_keys:
        return {"trainer.devices": after.ranks, **changed_keys}
    return changed_keys


def _keys(use: ModelUse) -> dict[str, Any]:
    return {
        "schedule.fragment_size": use.fragment,
        "encoder.workers": int(not use.encodes),
        "model.vae_tiling": use.tiles,
        "trainer.memory": "streamed" if use.trainer_streams else "resident",
        "rollout.memory": "streamed" if use.streams > use.trainer_streams else "resident",
        "model.weights": use.base,
        "rollout.weights": use.weights,
        "trainer.shard_devices": use.ranks,
    }
