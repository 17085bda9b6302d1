"""The device of this process, as a worker registers it."""

import torch

from shared.contracts import Device
from shared.model_memory import weight_bytes
from shared.recipe import Recipe
from shared.worker import host_memory


def this_device(
    recipe: Recipe,
    *,
    slots: int,
    memory_gib: float | None,
    fluid: bool = False,
    can_train: bool = False,
) -> Device:
    """What it is, what it has, and what it will need; asked before anything is loaded.

    ``memory_gib`` limits what it has, where others use the same device.
    """
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        kind, memory = properties.name, properties.total_memory
    else:
        kind, memory = "cpu", host_memory()
    if memory_gib is not None:
        memory = min(memory, int(memory_gib * 2**30))
    needs = weight_bytes(recipe.model.folder, recipe.model.dtype)
    return Device(
        kind=kind,
        memory_bytes=memory,
        needs_bytes=needs,
        slots=slots,
        fluid=fluid,
        can_train=can_train,
    )
