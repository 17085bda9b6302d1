"""The device of this process: which it is, what it has, what a model takes, and lack of memory."""

import gc
import os
import re
import traceback
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from shared.errors import OutOfMemory, UserError
from shared.messages.workers import Device
from shared.models.catalogue import check_family
from shared.models.memory import ITEM_BYTES, ModelPart, WeightsHolding, adapter_bytes, weight_bytes
from shared.process.worker import host_memory
from shared.recipe.networks import frozen_layers
from shared.recipe.recipe import Recipe

VISIBLE = "CUDA_VISIBLE_DEVICES"
DEVICE_FILES = Path("/dev")  # in a container, without the GPUs that it was not given
DRIVER_VERSION = Path("/sys/module/nvidia/version")
GPU_REMEDIES = {
    "not compiled|no kernel image|ARCH_MISMATCH": "install torch for this GPU (README, Install)",
    "too old": "update the driver, or install torch for an older CUDA (README, Install)",
    "No CUDA GPUs|device ordinal": "name GPUs that `nvidia-smi -L` lists",
    "not supported": "set PYTORCH_ALLOC_CONF=expandable_segments:False",
    "": "see whether `nvidia-smi` works (a container needs `--gpus all`)",
}
"""Pattern in torch's reason why it cannot use a GPU -> what a user can do; the first holds."""
SIGNS = ("out of memory", "not enough memory", "can't allocate memory")
"""Texts of allocators in a RuntimeError without a type of its own."""
CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")
MAX_REASON = 300
"""Characters quoted of the allocator's message."""

T = TypeVar("T")


def own_device(index: int = 0) -> torch.device:
    """Returns the GPU of this process with this index; the CPU if the process was given no GPU:
    CUDA_VISIBLE_DEVICES names none, or is not set and the host has none.

    Raises:
        UserError: if torch cannot use the GPU.
        OutOfMemory: if other programs leave no memory on it.
    """
    named = os.environ.get(VISIBLE, "0" if any(DEVICE_FILES.glob("nvidia[0-9]*")) else "")
    if named.split(",")[0].strip() in ("", "-1") and not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", index)
    try:
        with fits(device, "a matrix product", "end other programs on this GPU"):
            square = torch.ones(64, 64, device=device)
            (square @ square).sum().item()
    except (RuntimeError, AssertionError) as error:
        raise unusable_gpu(index, error) from error
    return device


def unusable_gpu(index: int, error: Exception) -> UserError:
    reason = str(error).partition("\n")[0].split(". Please")[0]
    remedy = next(text for signs, text in GPU_REMEDIES.items() if re.search(signs, reason))
    return UserError(
        f"{VISIBLE}={visible(index)}: torch {torch.__version__} "
        f"cannot use this GPU: {reason[:MAX_REASON]}; {remedy}, or compute on the CPU: set "
        f'model.device = "cpu", or {VISIBLE}="" for one process'
    )


def try_gpu() -> str:
    """Returns what this process's GPU is and has free, once it has computed a matrix product."""
    free, _ = torch.cuda.mem_get_info(own_device())
    gpu = torch.cuda.get_device_properties(0)
    driver = DRIVER_VERSION.read_text().strip() if DRIVER_VERSION.is_file() else "unknown"
    return f"{gpu.name}, driver {driver}, capability {gpu.major}.{gpu.minor}, {_gib(free)} free"


def this_device(
    recipe: Recipe,
    parts: Collection[ModelPart],
    *,
    trains: bool,
    concurrency: int,
    memory_gib: float | None,
    holding: WeightsHolding | None = None,
) -> Device:
    """Describes this process's device: what it has, and what it will need once it is loaded.

    ``parts`` are the parts of the model that it will hold, the network as in ``holding``, by
    default as for training; ``trains``: whether it will hold an optimizer's state; ``memory_gib``
    limits the memory of this process from now on, if others use the same device.
    """
    holding = holding or recipe.trainer_holding
    if own_device().type == "cuda":
        gpu = visible(0)
        properties = torch.cuda.get_device_properties(0)
        kind, memory = properties.name, properties.total_memory
    else:
        gpu, kind, memory = "", "cpu", host_memory()
        holding = replace(holding, memory="resident")  # the blocks lie in the same memory
    if memory_gib is not None:
        memory = min(memory, int(memory_gib * 2**30))
        if gpu:
            torch.cuda.set_per_process_memory_fraction(memory / properties.total_memory)
    return Device(
        kind=kind,
        gpu=gpu,
        memory_bytes=memory,
        needs_bytes=held_bytes(recipe, parts, trains=trains, holding=holding),
        concurrency=concurrency,
    )


def held_bytes(
    recipe: Recipe,
    parts: Collection[ModelPart],
    *,
    trains: bool,
    holding: WeightsHolding | None = None,
) -> int:
    """Returns the bytes that a device holds once it is loaded: weights, the network's as
    ``holding`` or the trainer has it, and besides them what is trained with gradient, optimizer and
    sets of weights, or the next version if it only generates. An encoder has weights alone.

    Raises:
        UserError: if the model's folder is invalid.
    """
    model, trainer = recipe.model, recipe.trainer
    num_bytes = weight_bytes(model.folder, model.dtype, parts, holding or recipe.trainer_holding)
    if set(parts) == {"text"}:
        return num_bytes
    network = weight_bytes(model.folder, model.dtype, {"transformer"})
    if trains and trainer.is_sharded and "decoder" in parts:
        num_bytes += network  # it is gathered to generate
    if model.trained == "full":
        return num_bytes + (_beside_all_weights(recipe, network) if trains else network)
    targets = model.lora.targets or check_family(model.folder).lora_targets
    adapter = adapter_bytes(model.folder, model.lora.rank, targets, frozen_layers(recipe))
    if not trains:
        return num_bytes + 2 * adapter
    if trainer.is_sharded:  # a rank reads its share alone, of a network that is not trained
        num_bytes -= network - network // trainer.shard_devices
    return num_bytes + adapter + _training_bytes(recipe, adapter, adapter)


def _beside_all_weights(recipe: Recipe, network: int) -> int:
    """Return the bytes that a device that trains all weights holds in addition to a network of this
    size. A rank holds its part of everything, with masters in place of the network, so the result
    is negative for many ranks."""
    in_float32 = network * max(1, ITEM_BYTES["float32"] // ITEM_BYTES[recipe.model.dtype])
    if not recipe.trainer.is_sharded:
        return _training_bytes(recipe, network, in_float32)
    whole = in_float32 + _training_bytes(recipe, in_float32, in_float32)
    return whole // recipe.trainer.shard_devices - network


def _training_bytes(recipe: Recipe, of_passes: int, in_float32: int) -> int:
    """Returns the bytes of everything that training adds to one set of weights."""
    sets = recipe.trained_sets
    return int(sets.size(of_passes, in_float32)) + in_float32


def visible(index: int) -> str:
    """Names a GPU of this process as CUDA_VISIBLE_DEVICES does."""
    given = os.environ.get(VISIBLE)
    return str(index) if given is None else given.split(",")[index].strip()


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
        forget_frames(error)
    if reason is not None:
        has = f"{device} has {_gib(device_bytes(device))}" if device.type == "cuda" else str(device)
        release(device)
        raise OutOfMemory(
            f"out of memory: {what} ({has}: {reason}); {remedy}", what=what, remedy=remedy
        )


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Copies a tensor of the host, of any shape, to the device, without waiting for it; on the
    device already, it is returned as it is.

    A plain copy waits until the device has done all work that is queued there, and is idle until
    the host has queued more.
    """
    if device.type == "cuda" and tensor.device.type == "cpu":
        tensor = tensor.pin_memory()  # torch keeps the memory until it has been copied
    return tensor.to(device, non_blocking=True)


def retry_after_release(device: torch.device, work: Callable[[], T]) -> T:
    """Returns what ``work`` returns. If it does not fit, it is repeated after all unused memory was
    released, since free memory may be fragmented."""
    try:
        return work()
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        forget_frames(error)
    release(device)
    return work()


class RowsAtOnce:
    """Takes as many rows at a time through a network as fit; half as many from when they do not."""

    def __init__(
        self,
        device: torch.device,
        most: int | None = None,
        waited: Callable[[], bool] = lambda: False,
    ) -> None:
        """``most`` rows at a time; without it, all that there are. ``waited``: waits for what else
        takes memory, and returns whether there was something; as many rows are then tried again."""
        self._device = device
        self._waited = waited
        self.most = most

    def run(self, rows: int, work: Callable[[slice], Tensor]) -> Tensor:
        """Returns what ``work`` makes of ``rows`` rows, a slice at a time, joined along the rows.

        Raises:
            RuntimeError: the allocator's, if not even one row fits, also when tried again.
        """
        while True:
            size = min(self.most or rows, rows)
            parts = _parts(rows, size, work)
            if size == 1:
                parts = [partial(retry_after_release, self._device, part) for part in parts]
            try:
                return _joined([part() for part in parts])
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error):
                    raise
                forget_frames(error)
                has_waited = self._waited()
                if size == 1 and not has_waited:
                    raise
            release(self._device)
            if not has_waited:
                self.most = (size + 1) // 2


def _parts(rows: int, size: int, work: Callable[[slice], T]) -> list[Callable[[], T]]:
    return [partial(work, slice(first, first + size)) for first in range(0, rows, size)]


def _joined(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def forget_frames(error: BaseException | None) -> None:
    """Empties the frames that an error has gone through: they hold the tensors of the work."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__context__


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error is a lack of memory, on a GPU or on the host."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    message = str(error).lower()
    return isinstance(error, RuntimeError) and any(sign in message for sign in SIGNS)


def release(device: torch.device) -> None:
    """Frees memory that nothing refers to any more."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def device_bytes(device: torch.device) -> int:
    """Return the memory of the device that this process may take; for the CPU, the memory of the
    host or the container."""
    if device.type == "cuda":
        share = torch.cuda.get_per_process_memory_fraction(device)
        return int(share * torch.cuda.get_device_properties(device).total_memory)
    host = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        return min(host, int(CGROUP_LIMIT.read_text()))
    except (OSError, ValueError):  # no such file, or "max"
        return host


def _gib(size: float) -> str:
    return f"{size / 2**30:.1f} GiB"


def choose_kernels(device: torch.device, matmul_precision: str) -> None:
    """Sets the precision of this process's float32 matrix products, and whose attention it uses.

    On a CPU products stay exact: some CPUs round them, most do not, and equal runs have to give
    equal bytes there. Torch may not choose cuDNN's attention of its own accord, as it does for half
    precision on an H100 or H200: its backward pass has read memory that is not there (FLUX.1 on an
    H200, torch 2.11), and has given no numbers (torch issues 169849 and 196678). Where
    `model.attention` names it, it is used.
    """
    torch.backends.cuda.enable_cudnn_sdp(False)
    if device.type == "cuda":
        torch.set_float32_matmul_precision(matmul_precision)
