"""The device of this process: what it has, what a model takes of it, and lack of memory."""

import gc
import os
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch

from shared.errors import OutOfMemory
from shared.messages.workers import Device
from shared.models.catalogue import checked_family_of
from shared.models.memory import AS_TRAINED, Holding, Part, adapter_bytes, weight_bytes
from shared.process.worker import host_memory
from shared.recipe.networks import frozen_layers
from shared.recipe.recipe import Recipe

SIGNS = ("out of memory", "not enough memory", "can't allocate memory")
"""What allocators write into a RuntimeError that has no type of its own."""
CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")
MAX_REASON = 300
"""Characters quoted of the allocator's message."""


def this_device(
    recipe: Recipe,
    parts: Collection[Part],
    *,
    trains: bool,
    concurrency: int,
    memory_gib: float | None,
    independent_devices: bool = False,
    can_train: bool = False,
    holding: Holding = AS_TRAINED,
) -> Device:
    """Describes this process's device: what it has, and what it will need once it is loaded.

    ``parts`` are the parts of the model that it will hold, the network as ``holding`` says;
    ``trains`` says whether it will hold an optimizer's state; ``memory_gib`` limits what it has if
    others use the same device.
    """
    gpu = ""
    if torch.cuda.is_available():
        gpu = visible(
            torch.cuda.device_count(),
            max(recipe.trainer.devices, recipe.trainer.ranks) if trains else 1,
        )
        properties = torch.cuda.get_device_properties(0)
        kind, memory = properties.name, properties.total_memory
    else:
        kind, memory = "cpu", host_memory()
        holding = replace(holding, memory="resident")  # the blocks lie in the same memory
    if memory_gib is not None:
        memory = min(memory, int(memory_gib * 2**30))
    return Device(
        kind=kind,
        gpu=gpu,
        memory_bytes=memory,
        needs_bytes=held_bytes(recipe, parts, trains=trains, holding=holding),
        concurrency=concurrency,
        independent_devices=independent_devices,
        can_train=can_train,
    )


def held_bytes(
    recipe: Recipe, parts: Collection[Part], *, trains: bool, holding: Holding = AS_TRAINED
) -> int:
    """Returns the bytes that a device holds once it is loaded: weights, the network's as
    ``holding`` says, and besides them the gradient and two moments of what is trained, or the next
    version if it only generates. An encoder has weights alone.

    Raises:
        UserError: if the model's folder is none.
    """
    model, trainer = recipe.model, recipe.trainer
    held = weight_bytes(model.folder, model.dtype, parts, holding)
    if set(parts) == {"text"}:
        return held
    if model.trained == "full":
        network = weight_bytes(model.folder, model.dtype, {"transformer"})
        if not trains:
            return held + network
        shared_by = trainer.ranks if trainer.sharded else 1
        return max(held, held - network + 4 * network // shared_by)  # loaded first, then sharded
    targets = model.lora.targets or checked_family_of(model.folder).lora_targets
    adapter = adapter_bytes(model.folder, model.lora.rank, targets, frozen_layers(recipe))
    return held + adapter * (4 if trains else 2)


def visible(count: int, used: int) -> str:
    """Names the first ``used`` of ``count`` GPUs, as CUDA_VISIBLE_DEVICES does."""
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = [str(number) for number in range(count)] if given is None else given.split(",")
    return ",".join(name.strip() for name in names[:used])


@contextmanager
def fits(device: torch.device, what: str, remedy: str) -> Iterator[None]:
    """Surrounds work on a device.

    Raises:
        OutOfMemory: if the work does not fit. The memory that its frames held is released by then.
    """
    reason = None
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        reason = " ".join(str(error).split())[:MAX_REASON]
    if reason is not None:
        has = f"{device} has {_gib(device_bytes(device))}" if device.type == "cuda" else str(device)
        release(device)
        raise OutOfMemory(f"out of memory: {what} ({has}: {reason}); {remedy}")


def is_out_of_memory(error: BaseException) -> bool:
    """Says whether an error is for lack of memory, on a GPU or on the host."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    said = str(error).lower()
    return isinstance(error, RuntimeError) and any(sign in said for sign in SIGNS)


def release(device: torch.device) -> None:
    """Frees memory that nothing refers to any more."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def device_bytes(device: torch.device) -> int:
    """Returns the memory of the device; for the CPU, that of the host or the container."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    host = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        return min(host, int(CGROUP_LIMIT.read_text()))
    except (OSError, ValueError):  # no such file, or "max"
        return host


def _gib(size: float) -> str:
    return f"{size / 2**30:.1f} GiB"
