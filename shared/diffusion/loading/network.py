"""Loads a network: built without memory for its weights, put where it belongs, then filled from its
files.

Weights are read straight into the tensors that keep them, some megabytes at a time. So nothing is
ever held twice, and a rank that keeps a shard reads no more than that shard. Types and buffers are
the same as with diffusers' ``from_pretrained``.
"""

import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from io import BufferedReader
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from shared.diffusion.loading.quantisation import quantise_blocks, quantised_layers
from shared.diffusion.loading.ranks import local_shard
from shared.errors import UserError
from shared.models.catalogue import PartConfig
from shared.models.memory import Form, read_header, weight_files

PIECE_BYTES = 16 * 2**20
"""Bytes that are read at a time."""
DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip
"""Types by the names that safetensors files give them."""

Progress = Callable[[int], None]
"""Gets the number of bytes of the files that have been loaded since the last call."""


def no_progress(num_bytes: int) -> None:
    """Ignore progress."""


def diffusers_class(name: str) -> Any:
    """Returns a class of diffusers; None if it has none of that name."""
    import diffusers

    return getattr(diffusers, name, None)


def build_network(
    folder: Path,
    dtype: torch.dtype,
    class_named: Callable[[str], Any] = diffusers_class,
    form: Form | None = None,
) -> nn.Module:
    """Builds the network of a diffusers folder without its weights: they are on the meta device, in
    the types in which diffusers loads them as ``dtype``, or in this form. Buffers are on the CPU;
    of those that the files hold as well, only the types are right.

    Raises:
        UserError: if the folder holds no network that is known.
    """
    from accelerate import init_empty_weights
    from diffusers.models.modeling_utils import no_init_weights

    config = PartConfig(folder / "config.json")
    cls = class_named(config["_class_name"])
    if cls is None:
        raise UserError(f"model.folder: {folder} holds no network that is known here")
    with _default_dtype(dtype), no_init_weights(), init_empty_weights(include_buffers=False):
        network: nn.Module = cls.from_config(dict(config))
    kept = set(getattr(network, "_keep_in_fp32_modules", None) or ())
    for name, tensor in stored_tensors(network).items():
        if tensor.is_floating_point():
            tensor.data = tensor.data.to(torch.float32 if kept & set(name.split(".")) else dtype)
    quantise_blocks(network, form)
    return network.requires_grad_(False).eval()


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def stored_tensors(network: nn.Module) -> dict[str, Tensor]:
    """Returns the parameters and buffers that a network holds as its files do, by name."""
    layers = quantised_layers(network)
    quantised = {f"{name}.{part}" for name in layers for part in ("weight", "scale")}
    stored = network.state_dict(keep_vars=True).items()
    return {name: tensor for name, tensor in stored if name not in quantised}


def materialize(network: nn.Module, device: torch.device) -> None:
    """Gives weights that are on the meta device memory on ``device``, without values, and moves
    everything else there."""
    network._apply(
        lambda tensor: (
            torch.empty_like(tensor, device=device) if tensor.is_meta else tensor.to(device)
        )
    )


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Describes where a file holds a tensor."""

    file: Path
    start: int
    """Offset of its first byte in the file."""
    dtype: torch.dtype
    shape: tuple[int, ...]


def find_tensors(folder: Path) -> dict[str, StoredTensor]:
    """Finds the tensors of the weight files of a network's folder, by name; raises UserError if one
    is no safetensors file."""
    return {
        name: _stored(file, start, name, entry)
        for file in weight_files(folder)
        for header, start in [read_header(file)]
        for name, entry in header.items()
        if name != "__metadata__" and entry["dtype"] in DTYPES
    }


def _stored(file: Path, start: int, name: str, entry: Mapping[str, Any]) -> StoredTensor:
    dtype, (first, last) = DTYPES[entry["dtype"]], entry["data_offsets"]
    if last - first != math.prod(entry["shape"]) * dtype.itemsize:
        raise UserError(f"model.folder: {file} is not a safetensors file: {name} has another size")
    return StoredTensor(file, start + first, dtype, tuple(entry["shape"]))


def fill(
    targets: Mapping[str, Tensor],
    stored: Mapping[str, StoredTensor],
    progress: Progress = no_progress,
) -> None:
    """Reads each target, or this rank's shard of it, from the tensor of its name, and converts it
    to the target's type. If a tensor has several names, the files need to hold one.

    Raises:
        UserError: if a tensor is missing, or has another shape.
    """
    check_fit(targets, stored)
    names = [name for name in targets if name in stored]
    cuda = any(target.is_cuda for target in targets.values())
    buffer = torch.empty(PIECE_BYTES, dtype=torch.uint8, pin_memory=cuda)
    names.sort(key=lambda name: (stored[name].file, stored[name].start))
    for file, file_names in itertools.groupby(names, key=lambda name: stored[name].file):
        with file.open("rb") as stream:
            for name in file_names:
                _read(stream, stored[name], targets[name], buffer, progress)


def check_fit(
    targets: Mapping[str, Tensor], stored: Mapping[str, StoredTensor], folder: Path | None = None
) -> None:
    """Raises UserError, which names the part's folder if it is given, if a tensor is missing or has
    another shape."""
    targets_with_values = {id(target) for name, target in targets.items() if name in stored}
    files = "its weight files" if folder is None else f"{folder}/*.safetensors"
    for name, target in targets.items():
        if id(target) not in targets_with_values:
            raise UserError(f"model.folder: {files} hold no {name}")
        if name in stored and stored[name].shape != tuple(target.shape):
            file, shape = stored[name].file, list(stored[name].shape)
            needed = f"the network's {list(target.shape)}"
            raise UserError(f"model.folder: {name} of {file} has the shape {shape}, {needed}")


@torch.no_grad()
def _read(
    stream: BufferedReader, stored: StoredTensor, target: Tensor, buffer: Tensor, progress: Progress
) -> None:
    flat, size = local_shard(target.detach()).view(-1), stored.dtype.itemsize
    stream.seek(stored.start + _first_element(target) * size)
    for piece in flat.split(PIECE_BYTES // size):
        raw = buffer[: piece.numel() * size]
        if stream.readinto(raw.numpy().data) != len(raw):
            raise UserError(f"model.folder: {stored.file} ends too early")
        piece.copy_(raw.view(stored.dtype))
        progress(len(raw))


def _first_element(target: Tensor) -> int:
    """Returns the position of this rank's shard in the whole tensor; shards are whole rows."""
    if not isinstance(target, DTensor):
        return 0
    _, offset = compute_local_shape_and_global_offset(
        target.shape, target.device_mesh, target.placements
    )
    return int(offset[0]) * math.prod(target.shape[1:])


@dataclass(slots=True)
class Place:
    """Puts a network where it belongs before its weights are read: on a device."""

    device: torch.device
    masters: dict[str, nn.Parameter] = field(default_factory=dict)
    """Float32 masters of weights that the network holds in half precision."""
    types: dict[str, torch.dtype] | None = None
    """Types in which weights are published, if they are not those that the network holds."""

    @property
    def share(self) -> float:
        """Returns the share of a network's files that is read."""
        return 1.0

    def put(self, network: nn.Module) -> None:
        """Gives the weights of a network memory."""
        materialize(network, self.device)

    def targets(self, network: nn.Module) -> dict[str, Tensor]:
        """Returns what the network's files are read into, by the names of the files' tensors."""
        return stored_tensors(network)

    def settle(self, network: nn.Module) -> None:
        """Is called when all is read."""


def load_networks(
    folder: Path,
    networks: Mapping[str, nn.Module],
    root: nn.Module,
    place: Place,
    progress: Progress = no_progress,
) -> None:
    """Reads the weights of networks that `build_network` has made from the subfolders of their
    names. ``root`` is the only network, or has all of them as modules.

    Raises:
        UserError: if weights are missing, or of another network.
    """
    place.put(root)
    stored = _find_tensors(folder, networks, root)
    fill(place.targets(root), stored, progress)
    for name, layer in quantised_layers(root).items():
        matrix = torch.empty(layer.size, dtype=layer.compute_dtype, device=layer.weight.device)
        fill({f"{name}.weight": matrix}, stored, progress)
        layer.hold(matrix)
    place.settle(root)


def _find_tensors(
    folder: Path, networks: Mapping[str, nn.Module], root: nn.Module
) -> dict[str, StoredTensor]:
    """Finds the tensors of networks by the names that they have in ``root``."""
    names = {module: name for name, module in root.named_modules()}
    stored: dict[str, StoredTensor] = {}
    for name, network in networks.items():
        tensors = find_tensors(folder / name)
        network._fix_state_dict_keys_on_load(tensors)  # type: ignore[operator]  # of old files
        prefix = f"{names[network]}." if names[network] else ""
        stored |= {prefix + key: each for key, each in tensors.items()}
    return stored
