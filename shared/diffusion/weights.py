"""The trained weights, an adapter's or all of the network's, and the digest of their content."""

import hashlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from shared.errors import IntegrityError

ADAPTER = "default"
MARKER = f".{ADAPTER}."
"""In the names of an adapter's parameters; not in the names that they are exported by."""


def trained_parameters(network: nn.Module) -> dict[str, nn.Parameter]:
    """By their exported names, sorted: the adapter's, or without one every parameter there is."""
    named = dict(network.named_parameters())
    if is_adapter(network):
        named = {n.replace(MARKER, "."): each for n, each in named.items() if _adapts(n)}
    return dict(sorted(named.items()))


def is_adapter(network: nn.Module) -> bool:
    """Whether an adapter is trained, and the network under it stays as it was."""
    return any(_adapts(name) for name, _ in network.named_parameters())


def _adapts(name: str) -> bool:
    return MARKER in name and "lora_" in name


def full_tensor(tensor: Tensor) -> Tensor:
    """Of a sharded tensor all of it, for which all ranks have to ask; others as they are."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def local_shard(tensor: Tensor) -> Tensor:
    """Of a sharded tensor the part that is here; others as they are."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def trained_tensors(network: nn.Module) -> dict[str, Tensor]:
    """A copy of the trained weights on the CPU."""
    parameters = trained_parameters(network)
    return {name: full_tensor(p.detach()).to("cpu", copy=True) for name, p in parameters.items()}


@torch.no_grad()
def load_weights(network: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Overwrite the trained weights in place.

    Raises:
        IntegrityError: if names, shapes or types are not those of the network's.
    """
    parameters = trained_parameters(network)
    _check_fit(parameters, tensors)
    for name, parameter in parameters.items():
        parameter.copy_(shard_like(parameter, tensors[name]))


def shard_like(parameter: Tensor, tensor: Tensor) -> Tensor:
    """On its device; of a sharded one this rank's part, cut without asking the others."""
    here = tensor.to(parameter.device)
    if not isinstance(parameter, DTensor):
        return here
    mesh, placements = parameter.device_mesh, parameter.placements
    return distribute_tensor(here, mesh, placements, src_data_rank=None)


@dataclass(slots=True)
class StagedTensors:
    """Weights that are checked, on the device and digested: ready to be put in use at once."""

    digest: str
    tensors: dict[str, Tensor]
    """By exported name. Empty once adopted: from then on they belong to the network."""


@torch.no_grad()
def stage_weights(network: nn.Module, tensors: Mapping[str, Tensor]) -> StagedTensors:
    """Prepare weights for `WeightsInUse.adopt`: all of the work, on copies of ``tensors``.

    Of the network it reads names, shapes, types and devices alone, so that it may run in another
    thread while the network generates.

    Raises:
        IntegrityError: if names, shapes or types are not those of the network.
    """
    parameters = trained_parameters(network)
    _check_fit(parameters, tensors)
    device = next(iter(parameters.values())).device
    with _stream_of_its_own(device):
        copies = {name: tensors[name].detach().to(device, copy=True) for name in parameters}
        return StagedTensors(digest=weights_digest(copies), tensors=copies)


@contextmanager
def _stream_of_its_own(device: torch.device) -> Iterator[None]:
    """On a GPU, copies that do not queue behind the denoising step; they are done at the end."""
    if device.type != "cuda":
        yield
        return
    stream = torch.cuda.Stream(device)
    with torch.cuda.stream(stream):
        yield
    stream.synchronize()


def _check_fit(parameters: Mapping[str, nn.Parameter], tensors: Mapping[str, Tensor]) -> None:
    wanted = {(name, tuple(p.shape), p.dtype) for name, p in parameters.items()}
    given = {(name, tuple(t.shape), t.dtype) for name, t in tensors.items()}
    if wanted != given:
        name, shape, dtype = min(wanted ^ given, key=str)
        raise IntegrityError(
            f"these weights belong to another adapter or model: {name} {list(shape)} {dtype}"
        )


def weights_digest(tensors: Mapping[str, Tensor]) -> str:
    """sha256 over names, shapes, types and values: what weights are, however they are stored."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        tensor = full_tensor(tensors[name].detach()).cpu().contiguous()
        digest.update(f"{name}|{tensor.dtype}|{tuple(tensor.shape)}|".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


class WeightsInUse:
    """The digest of the weights a network really holds, recomputed when one of them has changed.

    Of sharded weights too, for which all ranks have to ask.
    """

    def __init__(self, network: nn.Module) -> None:
        self._parameters = trained_parameters(network)
        self._seen: tuple[tuple[int, int], ...] = ()
        self._digest = ""

    def digest(self) -> str:
        state = self._state()
        if state != self._seen:
            self._digest = weights_digest(self._parameters)
            self._seen = state
        return self._digest

    def adopt(self, staged: StagedTensors) -> str:
        """Put staged weights in use by exchanging pointers; returns their digest.

        The parameters stay the objects they were, gradients included. To be called between two
        fragments, by whoever has the device.

        Raises:
            ValueError: if they were adopted before. They may have been changed in place since.
        """
        tensors, staged.tensors = staged.tensors, {}
        if not tensors:
            raise ValueError("staged weights can be adopted only once")
        for name, parameter in self._parameters.items():
            if parameter.is_cuda:  # memory of another stream: not to be reused under this one
                tensors[name].record_stream(torch.cuda.current_stream(parameter.device))
            parameter.data = tensors[name]
        # Pointers are used again by the allocator: whoever else watches must see a new version.
        torch.autograd.graph.increment_version(list(self._parameters.values()))
        self._digest, self._seen = staged.digest, self._state()
        return staged.digest

    def _state(self) -> tuple[tuple[int, int], ...]:
        # torch counts the in-place changes of a tensor in `_version`.
        parameters = self._parameters.values()
        return tuple((local_shard(p).data_ptr(), p._version) for p in parameters)
