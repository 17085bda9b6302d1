"""A LoRA adapter on the transformer."""

from dataclasses import dataclass

import torch
from torch import nn

from shared.diffusion.weights import ADAPTER, trained_parameters
from shared.errors import UserError


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraSpec:
    rank: int
    alpha: float
    targets: tuple[str, ...]
    """Suffixes of the names of the linear layers that are adapted."""
    excluded: tuple[str, ...] = ()
    """Prefixes of the names of layers that are left alone."""
    seed: int
    """Seed of the Gaussian initialisation of the A matrices; B starts at zero."""


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
    for parameter in trained_parameters(transformer).values():
        parameter.data = parameter.data.to(torch.promote_types(parameter.dtype, torch.float32))


def _target_layers(transformer: nn.Module, spec: LoraSpec) -> list[str]:
    """Returns the full names of the layers to adapt."""
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
