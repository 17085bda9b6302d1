"""The trained weights, an adapter's or all of the network's, and the digest of their content."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from shared.diffusion.loading.ranks import full_tensor, local_shard
from shared.diffusion.weights.checksum import checksum
from shared.diffusion.weights.rounding import add_flat, decode
from shared.diffusion.weights.shards import TensorAssembly, read_part
from shared.errors import IntegrityError
from shared.run.manifest import FetchedObject

ADAPTER = "default"
MARKER = f".{ADAPTER}."
"""Part of the names of an adapter's parameters; left out of the names that they are exported by."""


def trained_parameters(network: nn.Module) -> dict[str, nn.Parameter]:
    """Returns the adapter's parameters, or without an adapter all of them, by their sorted exported
    names."""
    named = dict(network.named_parameters())
    if is_adapter(network):
        named = {n.replace(MARKER, "."): each for n, each in named.items() if _adapts(n)}
    return dict(sorted(named.items()))


def is_adapter(network: nn.Module) -> bool:
    """Whether an adapter is trained, and the network under it stays as it was."""
    return any(_adapts(name) for name, _ in network.named_parameters())


def _adapts(name: str) -> bool:
    return MARKER in name and "lora_" in name


def trained_tensors(network: nn.Module) -> dict[str, Tensor]:
    """Copies the trained weights to the CPU, in their full shapes and by their exported names."""
    parameters = trained_parameters(network)
    return {name: full_tensor(p.detach()).to("cpu", copy=True) for name, p in parameters.items()}


@torch.no_grad()
def load_weights(network: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Overwrites the trained weights in place. Float32 ones, such as averages, are rounded to what
    the network holds.

    Raises:
        IntegrityError: if names, shapes or types do not match the network.
    """
    parameters = trained_parameters(network)
    wide = {name for name, tensor in tensors.items() if tensor.dtype == torch.float32}
    types = {
        n: torch.float32 if n in wide and is_half(p) else p.dtype for n, p in parameters.items()
    }
    _check_fit(parameters, tensors, types)
    for name, parameter in parameters.items():
        parameter.copy_(shard_like(parameter, tensors[name]))


def shard_like(parameter: Tensor, tensor: Tensor) -> Tensor:
    """Puts a full tensor on the parameter's device; cuts out this rank's part if the parameter is
    sharded, without asking the others. The result has the parameter's shape."""
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
    """Tensors by exported name. Empty once adopted: from then on they belong to the network."""


class Staging:
    """Prepares weights for `WeightsInUse.adopt`, one object after the other, as copies on the
    network's device.

    It reads only names, shapes, types and devices of the network, so it may run in other threads
    while the network generates.
    """

    def __init__(self, network: nn.Module, *, is_change: bool = False) -> None:
        """``is_change``: what is added is the change from the weights that the network holds."""
        parameters = trained_parameters(network)
        self._device = next(iter(parameters.values())).device
        self._assembly = TensorAssembly()
        self._change: dict[str, Tensor] | None = {} if is_change else None
        make = torch.clone if is_change else torch.empty_like
        with _copy_stream(self._device):
            self._copies = {name: make(each.detach()) for name, each in parameters.items()}
        for name, copy in self._copies.items() if not is_change else ():
            self._assembly.expect(name, copy)

    @torch.no_grad()
    def add(self, part: FetchedObject) -> None:
        """Copies what an object holds.

        Raises:
            ContractError: if it holds no tensors, or others than it must.
            IntegrityError: if names, shapes or types do not match the network.
        """
        with _copy_stream(self._device):
            for name, tensor, piece in read_part(part):
                if self._change is not None:
                    self._change[name] = tensor
                else:
                    self._assembly.add(name, tensor, piece)

    @torch.no_grad()
    def finish(self, digest: str | None = None) -> StagedTensors:
        """Returns the weights with their digest; raises IntegrityError if some are missing.

        ``digest``: of the weights, if it is known from the digests of the added objects."""
        self._assembly.finish()
        with _copy_stream(self._device):
            if self._change is not None:
                size = sum(each.numel() for each in self._copies.values())
                add_flat(self._copies.values(), decode(self._change, size))
            digest = digest or weights_digest(self._copies)
            return StagedTensors(digest=digest, tensors=self._copies)


@contextmanager
def _copy_stream(device: torch.device) -> Iterator[None]:
    """Keeps copies on a GPU from queueing behind the denoising step; they are done at the end."""
    if device.type != "cuda":
        yield
        return
    stream = torch.cuda.Stream(device)
    with torch.cuda.stream(stream):
        yield
    stream.synchronize()


def _check_fit(
    parameters: Mapping[str, Tensor],
    tensors: Mapping[str, Tensor],
    types: Mapping[str, torch.dtype] | None = None,
) -> None:
    """Raises IntegrityError unless names and shapes of ``tensors`` match the parameters, and their
    types match too, or ``types`` if given."""
    types = types or {name: p.dtype for name, p in parameters.items()}
    wanted = {(name, tuple(p.shape), types[name]) for name, p in parameters.items()}
    given = {(name, tuple(t.shape), t.dtype) for name, t in tensors.items()}
    if wanted != given:
        name, shape, dtype = min(wanted ^ given, key=str)
        raise IntegrityError(
            f"these weights belong to another adapter or model: {name} {list(shape)} {dtype}"
        )


def is_half(tensor: Tensor) -> bool:
    """Whether a tensor holds fewer bits than float32."""
    return tensor.dtype.itemsize < torch.float32.itemsize


def weights_digest(
    tensors: Mapping[str, Tensor], types: Mapping[str, torch.dtype] | None = None
) -> str:
    """Returns the digest of weights, by their checksum; of the values in other ``types``, if they
    are given. For sharded weights all ranks compute it together."""
    values = {
        name: tensor.detach() if types is None else tensor.detach().to(types[name])
        for name, tensor in tensors.items()
    }
    return checksum(values).digest


State = tuple[tuple[int, int], ...]
"""Where the weights of a network lie, and how often they were changed in place: the same weights as
long as it is the same."""


class WeightsInUse:
    """Caches the digest of the weights that a network really holds: it is computed again after a
    change, except for a return to the previous set.
    """

    def __init__(self, network: nn.Module, types: Mapping[str, torch.dtype] | None = None) -> None:
        """``types``: those in which the weights are used, if the network holds them in others."""
        self._parameters = trained_parameters(network)
        self._types = types
        self._seen: dict[State, str] = {}
        """Digests of the two newest sets of weights."""

    def digest(self) -> str:
        state = self.state
        cached = self._seen.get(state)
        if cached is None:
            cached = weights_digest(self._parameters, self._types)
            self.know(state, cached)
        return cached

    def know(self, state: State, digest: str) -> None:
        """Note the digest of the weights that the network held in a state: of a copy of them that
        was taken then."""
        before = [each for each in self._seen.items() if each[0] != state]
        self._seen = dict([*before[-1:], (state, digest)])

    def adopt(self, staged: StagedTensors) -> str:
        """Puts staged weights in use by exchanging pointers; returns their digest.

        The parameters stay the same objects, gradients included. Call it between two fragments,
        with the device to yourself.

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
        self._seen = {self.state: staged.digest}
        return staged.digest

    @property
    def state(self) -> State:
        # torch counts the in-place changes of a tensor in `_version`.
        parameters = self._parameters.values()
        return tuple((local_shard(p).data_ptr(), p._version) for p in parameters)
