"""The device of this process, as a worker registers it."""

import os
from collections.abc import Collection

import torch

from shared.messages.workers import Device
from shared.models.catalogue import checked_family_of
from shared.models.memory import Part, adapter_bytes, weight_bytes
from shared.process.worker import host_memory
from shared.recipe.recipe import Recipe


def this_device(
    recipe: Recipe,
    parts: Collection[Part],
    *,
    trains: bool,
    concurrency: int,
    memory_gib: float | None,
    independent_devices: bool = False,
    can_train: bool = False,
) -> Device:
    """Describes this process's device: what it has, and what it will need once it is loaded.

    ``parts`` are the parts of the model that it will hold; ``trains`` says whether it will hold an
    optimizer's state; ``memory_gib`` limits what it has if others use the same device.
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
    if memory_gib is not None:
        memory = min(memory, int(memory_gib * 2**30))
    return Device(
        kind=kind,
        gpu=gpu,
        memory_bytes=memory,
        needs_bytes=held_bytes(recipe, parts, trains=trains),
        concurrency=concurrency,
        independent_devices=independent_devices,
        can_train=can_train,
    )


def held_bytes(recipe: Recipe, parts: Collection[Part], *, trains: bool) -> int:
    """Returns the bytes that a device holds once it is loaded: weights, and besides them the
    gradient and two moments of what is trained, or the next version if it only generates.

    Raises:
        UserError: if the model's folder is none.
    """
    model, trainer = recipe.model, recipe.trainer
    held = weight_bytes(model.folder, model.dtype, parts)
    if model.trained == "full":
        network = weight_bytes(model.folder, model.dtype, {"transformer"})
        if not trains:
            return held + network
        shared_by = trainer.ranks if trainer.sharded else 1
        return max(held, held - network + 4 * network // shared_by)  # loaded first, then sharded
    targets = model.lora.targets or checked_family_of(model.folder).lora_targets
    adapter = adapter_bytes(model.folder, model.lora.rank, targets)
    return held + adapter * (4 if trains else 2)


def visible(count: int, used: int) -> str:
    """Names the first ``used`` of ``count`` GPUs, as CUDA_VISIBLE_DEVICES does."""
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = [str(number) for number in range(count)] if given is None else given.split(",")
    return ",".join(name.strip() for name in names[:used])
