"""Recipe keys that reduce the memory of a model on a device that is too small.

Remedies that do not change results come first:

fragments    fewer samples at the same time
encoder      a separate process runs the text encoders, and the results are bit-identical
tiles        videos are decoded in tiles
streamed     the network's blocks are copied from the host's memory one after the other; the
             weights are the same, and PCIe limits the speed
int8         rollout devices quantise the network, and importance weights correct the difference

Further remedies for a device that trains: it does not generate, it shares the weights in a shard
group, it trains an adapter on a quantised network, or it streams the network's blocks.
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
"""Quantised forms of the network under a trained adapter."""
SHARD_DEVICES = (2, 4, 8)
"""Possible sizes of shard groups."""
MEMORY_NEEDS = {"rollout": rollout_needs, "trainer": trainer_needs, "member": member_needs}
ONLY_TRAINS = {"schedule.mode": "disaggregated", "schedule.tag": "off"}
"""Keys by which members only train."""


def memory_remedy(profile: Profile, use: ModelUse, kind: str, role: Role) -> str:
    """Return a clause with the keys that make the model fit this kind of device in this role; empty
    if the profile has no memory figures."""
    if profile.memory is None:
        return ""
    available_gib = device(profile, kind).memory_gib
    smallest: DeviceMemory | None = None
    for each, new_role in _alternatives(use, role):
        needed = MEMORY_NEEDS[new_role](profile.memory, each)
        if needed.total <= available_gib * MEMORY_SHARE:
            remedy_keys = keys(use, each)
            remedy_keys |= ONLY_TRAINS if new_role != role else {}
            return f"it would take {needed.total:.3g} GiB with {as_toml(remedy_keys)}"
        if smallest is None or needed.total < smallest.total:
            smallest = needed
    if smallest is None:
        return ""
    return f"no key makes it fit; the minimum is {smallest.total:.3g} GiB"


def row_remedy(profile: Profile, use: ModelUse, kind: str, role: Role, rows: int) -> str:
    """Return the keys with which a training pass on this kind of device has at least ``rows`` rows;
    empty if no keys suffice."""
    for each, new_role in _alternatives(use, role):
        if new_role == role and pass_rows(with_memory(profile, each), kind, role) >= rows:
            return as_toml(keys(use, each))
    return ""


def _alternatives(use: ModelUse, role: Role) -> Iterator[tuple[ModelUse, Role]]:
    """Yield uses that need less memory than ``use``, each with the role of the device.

    If a member generates and trains, a remedy is that it only trains: its role is then trainer."""
    if role == "rollout":
        yield from ((each, role) for each in smaller_rollout_uses(use))
        return
    if role == "member":
        smaller = replace(use, encodes=False)
        for each in (replace(use, fragment=1), smaller, replace(smaller, tiles=True)):
            yield each, role
        yield use, "trainer"
    roles: tuple[Role, ...] = ("member", "trainer") if role == "member" else ("trainer",)
    yield from ((each, new_role) for new_role in roles for each in sharded_uses(use))
    if use.rank and use.ranks == 1:
        smaller = replace(use, encodes=False)
        forms = ADAPTER_BASE_FORMS if use.base is None else ()
        changes = [replace(smaller, base=form) for form in forms]
        if not use.trainer_streams:
            changes.append(replace(smaller, streams=True, trainer_streams=True))
        yield from ((each, new_role) for new_role in roles for each in changes)
        yield from ((replace(each, fragment=1), new_role) for new_role in roles for each in changes)


def smaller_rollout_uses(use: ModelUse) -> Iterator[ModelUse]:
    """Yield uses that need less memory than ``use`` on a device that generates."""
    smaller = replace(use, encodes=False)
    if use.fragment > 1:
        yield replace(use, fragment=1)
    yield smaller
    yield replace(smaller, tiles=True)
    if not use.rank or use.streams or use.weights is not None or use.base is not None:
        return
    quantised = (replace(smaller, weights="int8"),) if use.has_importance_weights else ()
    for change in (replace(smaller, streams=True), *quantised):
        yield change
        yield replace(change, tiles=True)


def sharded_uses(use: ModelUse) -> Iterator[ModelUse]:
    """Yield uses with larger shard groups; quantised weights cannot be sharded."""
    if use.base is None:
        yield from (replace(use, ranks=size) for size in SHARD_DEVICES if size > use.ranks)


def keys(before: ModelUse, after: ModelUse) -> dict[str, Any]:
    """Return the recipe keys whose values differ between two uses, with the values of ``after``."""
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
