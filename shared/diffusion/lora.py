"""The trained weights: a LoRA adapter on the transformer, and the digest that names its content."""

import hashlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from shared.errors import IntegrityError, UserError

ADAPTER = "default"


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraSpec:
    rank: int
    alpha: float
    targets: tuple[str, ...]
    """Suffixes of the names of linear layers."""
    excluded: tuple[str, ...] = ()
    """Beginnings of the names of those that are left alone."""
    seed: int
    """Of the Gaussian initialisation of the A matrices; B starts at zero."""


def attach_lora(transformer: nn.Module, spec: LoraSpec) -> None:
    """Add a fresh adapter, in float32 at least and without dropout: a replay equals its sample.

    Raises:
        UserError: if no layer has the name that a target says.
    """
    from peft import LoraConfig

    config = LoraConfig(
        r=spec.rank,
        lora_alpha=spec.alpha,
        init_lora_weights="gaussian",
        target_modules=_target_layers(transformer, spec),
        lora_dropout=0.0,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(spec.seed)
        transformer.add_adapter(config, adapter_name=ADAPTER)  # type: ignore[operator]
    for parameter in adapter_parameters(transformer).values():
        parameter.data = parameter.data.to(torch.promote_types(parameter.dtype, torch.float32))


def _target_layers(transformer: nn.Module, spec: LoraSpec) -> list[str]:
    """Their whole names."""
    layers = [name for name, each in transformer.named_modules() if isinstance(each, nn.Linear)]
    for target in spec.targets:
        if not any(_ends_with(name, target) for name in layers):
            raise UserError(f"model.lora.targets: the model has no linear layer named {target}")
    return [
        name
        for name in layers
        if any(_ends_with(name, target) for target in spec.targets)
        and not name.startswith(spec.excluded)
    ]


def _ends_with(name: str, suffix: str) -> bool:
    return name == suffix or name.endswith(f".{suffix}")


def adapter_parameters(transformer: nn.Module) -> dict[str, nn.Parameter]:
    """The adapter's parameters by their exported names, sorted."""
    marker = f".{ADAPTER}."
    named = {
        name.replace(marker, "."): parameter
        for name, parameter in transformer.named_parameters()
        if marker in name and "lora_" in name
    }
    return dict(sorted(named.items()))


def adapter_tensors(transformer: nn.Module) -> dict[str, Tensor]:
    """A copy of the adapter on the CPU."""
    parameters = adapter_parameters(transformer)
    return {name: tensor.detach().to("cpu", copy=True) for name, tensor in parameters.items()}


@torch.no_grad()
def load_adapter(transformer: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Overwrite the adapter in place.

    Raises:
        IntegrityError: if names, shapes or types are not those of the attached adapter.
    """
    parameters = adapter_parameters(transformer)
    _check_fit(parameters, tensors)
    for name, parameter in parameters.items():
        parameter.copy_(tensors[name])


@dataclass(slots=True)
class StagedAdapter:
    """Weights that are checked, on the device and digested: ready to be put in use at once."""

    digest: str
    tensors: dict[str, Tensor]
    """By exported name. Empty once adopted: from then on they belong to the network."""


@torch.no_grad()
def stage_adapter(transformer: nn.Module, tensors: Mapping[str, Tensor]) -> StagedAdapter:
    """Prepare weights for `WeightsInUse.adopt`: all of the work, on copies of ``tensors``.

    Of the network it reads names, shapes, types and devices alone, so that it may run in another
    thread while the network generates.

    Raises:
        IntegrityError: if names, shapes or types are not those of the attached adapter.
    """
    parameters = adapter_parameters(transformer)
    _check_fit(parameters, tensors)
    device = next(iter(parameters.values())).device
    with _stream_of_its_own(device):
        copies = {name: tensors[name].detach().to(device, copy=True) for name in parameters}
        return StagedAdapter(digest=weights_digest(copies), tensors=copies)


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
            f"these weights belong to another adapter: {name} {list(shape)} {dtype}"
        )


def weights_digest(tensors: Mapping[str, Tensor]) -> str:
    """sha256 over names, shapes, types and values: what weights are, however they are stored."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name].detach().cpu().contiguous()
        digest.update(f"{name}|{tensor.dtype}|{tuple(tensor.shape)}|".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


class WeightsInUse:
    """The digest of the weights a network really holds, recomputed when one of them has changed."""

    def __init__(self, transformer: nn.Module) -> None:
        self._parameters = adapter_parameters(transformer)
        self._seen: tuple[tuple[int, int], ...] = ()
        self._digest = ""

    def digest(self) -> str:
        state = self._state()
        if state != self._seen:
            self._digest = weights_digest(self._parameters)
            self._seen = state
        return self._digest

    def adopt(self, staged: StagedAdapter) -> str:
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
        return tuple((p.data_ptr(), p._version) for p in self._parameters.values())
