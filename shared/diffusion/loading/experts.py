"""A network of two experts: the noise level of a row selects its expert (Wan2.2)."""

from collections.abc import Callable, Mapping
from copy import copy
from typing import Any

import torch
from torch import Tensor, nn

from shared.models.families import EXPERTS
from shared.models.sigmas import TRAIN_TIMESTEPS

HIGH, LOW = EXPERTS.values()


class Experts(nn.Module):
    """Holds two experts, one for high noise and one for low noise.

    The name of an expert is the name of its folder, and the prefix of its parameters. The class has
    the methods of a network of diffusers that the project uses.
    """

    def __init__(self, high: nn.Module, low: nn.Module, *, boundary: float) -> None:
        """``boundary`` is the smallest sigma of high noise."""
        super().__init__()
        self.add_module(HIGH, high)
        self.add_module(LOW, low)
        self.config = high.config
        self._first_timestep = boundary * TRAIN_TIMESTEPS

    @property
    def networks(self) -> Mapping[str, nn.Module]:
        """Both networks, by the names of their folders."""
        return dict(self.named_children())

    @property
    def _no_split_modules(self) -> list[str]:
        return _names(self.networks, "_no_split_modules")

    @property
    def _keep_in_fp32_modules(self) -> list[str]:
        return _names(self.networks, "_keep_in_fp32_modules")

    def forward(
        self, hidden_states: Tensor, timestep: Tensor, return_dict: bool = False, **inputs: Tensor
    ) -> tuple[Tensor]:
        """Returns velocities (B, ...) from latents (B, ...), timestep (B,) and tensors of B rows.

        The CPU selects the experts: an expert without rows does not run.
        """
        is_high = self.is_high(timestep)
        if bool(is_high.all()):
            return self._run(HIGH, hidden_states, timestep, inputs)
        if not bool(is_high.any()):
            return self._run(LOW, hidden_states, timestep, inputs)
        rows_by_expert = {HIGH: is_high.nonzero().flatten(), LOW: (~is_high).nonzero().flatten()}
        outputs = [
            self._run(name, hidden_states[rows], timestep[rows], take_rows(inputs, rows))[0]
            for name, rows in rows_by_expert.items()
        ]
        order = torch.cat(list(rows_by_expert.values())).argsort()
        return (torch.cat(outputs)[order],)

    def is_high(self, timestep: Tensor) -> Tensor:
        """Return (B,): whether each row has high noise."""
        return timestep >= self._first_timestep

    def _run(
        self, name: str, hidden_states: Tensor, timestep: Tensor, inputs: Mapping[str, Tensor]
    ) -> tuple[Tensor]:
        velocity: Tensor = self.networks[name](
            hidden_states=hidden_states, timestep=timestep, return_dict=False, **inputs
        )[0]
        return (velocity,)

    def add_adapter(self, config: Any, adapter_name: str) -> None:
        """Adds an adapter to each expert with layers in ``config``, a configuration of peft."""
        for name, network in self.networks.items():
            prefix = f"{name}."
            layers = {
                layer.removeprefix(prefix)
                for layer in config.target_modules
                if layer.startswith(prefix)
            }
            if layers:
                own = copy(config)
                own.target_modules = layers
                network.add_adapter(own, adapter_name=adapter_name)  # type: ignore[operator]

    def enable_gradient_checkpointing(self, by: Callable[..., Any] | None = None) -> None:
        for network in self.networks.values():
            network.enable_gradient_checkpointing(by)  # type: ignore[operator]

    def set_attention_backend(self, backend: str) -> None:
        for network in self.networks.values():
            network.set_attention_backend(backend)  # type: ignore[operator]


def named_networks(network: nn.Module) -> Mapping[str, nn.Module]:
    """Returns the diffusers networks of a model by folder name.

    With two experts, the folder name is also the prefix of the parameter names."""
    return network.networks if isinstance(network, Experts) else {HIGH: network}


def _names(networks: Mapping[str, nn.Module], attribute: str) -> list[str]:
    """Returns the union of a list attribute of the networks, without duplicates."""
    lists = (getattr(network, attribute, None) or () for network in networks.values())
    return list(dict.fromkeys(name for names in lists for name in names))


def take_rows(inputs: Mapping[str, Tensor], rows: Tensor | slice) -> dict[str, Tensor]:
    return {name: tensor[rows] for name, tensor in inputs.items()}
