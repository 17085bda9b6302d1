"""The trained weights: a LoRA adapter on the transformer, and the digest that names its content."""

import hashlib
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from shared.errors import IntegrityError

ADAPTER = "default"


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraSpec:
    rank: int
    alpha: float
    targets: tuple[str, ...]
    seed: int
    """Of the Gaussian initialisation of the A matrices; B starts at zero."""


def attach_lora(transformer: nn.Module, spec: LoraSpec) -> None:
    """Add a fresh adapter, in float32 at least and without dropout: a replay equals its sample."""
    from peft import LoraConfig

    config = LoraConfig(
        r=spec.rank,
        lora_alpha=spec.alpha,
        init_lora_weights="gaussian",
        target_modules=list(spec.targets),
        lora_dropout=0.0,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(spec.seed)
        transformer.add_adapter(config, adapter_name=ADAPTER)  # type: ignore[operator]
    for parameter in adapter_parameters(transformer).values():
        parameter.data = parameter.data.to(torch.promote_types(parameter.dtype, torch.float32))


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
def load_adapter(transformer: nn.Module, tensors: dict[str, Tensor]) -> None:
    """Overwrite the adapter in place.

    Raises:
        IntegrityError: if names or shapes are not those of the attached adapter.
    """
    parameters = adapter_parameters(transformer)
    wanted = {name: tuple(parameter.shape) for name, parameter in parameters.items()}
    given = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    if wanted != given:
        odd = sorted(set(wanted.items()) ^ set(given.items()))[0]
        raise IntegrityError(f"these weights belong to another adapter: {odd[0]} {odd[1]}")
    for name, parameter in parameters.items():
        parameter.copy_(tensors[name])


def weights_digest(tensors: dict[str, Tensor] | dict[str, nn.Parameter]) -> str:
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
        # torch counts the in-place changes of a tensor in `_version`.
        state = tuple((p.data_ptr(), p._version) for p in self._parameters.values())
        if state != self._seen:
            self._digest = weights_digest(self._parameters)
            self._seen = state
        return self._digest
