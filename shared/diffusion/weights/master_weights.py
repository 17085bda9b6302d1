"""Weights as an optimizer trains them: float32 masters of those that a network holds in half
precision.

A step of an optimizer is often smaller than the distance between two numbers in bfloat16, so that
the weights of a network in bfloat16 would stay where they are. Their masters move; what the network
computes with, and what is published, are the masters rounded to the network's types.

    on one device        the network holds the rounded weights, and the masters are separate
        tensors
    shared by ranks      the shards are the masters (FSDP2): each pass gathers them rounded

With `exchange.down` an adapter has masters as well: a version is the one before and the rounded
change to the masters. Sampler and trainer compute with the version, so the ratio on-policy is
exact, and the next change makes up for what rounding has left out.
"""

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector

from shared.diffusion.loading.network import Place, materialize, stored_tensors
from shared.diffusion.weights.rounding import add_flat, decode, encode
from shared.diffusion.weights.sharding import ranks_mesh, shard
from shared.diffusion.weights.trained_weights import is_half, trained_parameters
from shared.messages.records import ChosenLevel


class TrainedWeights:
    """The weights of a network that are trained, by their exported names."""

    def __init__(
        self,
        network: nn.Module,
        masters: Mapping[str, nn.Parameter] | None = None,
        types: Mapping[str, torch.dtype] | None = None,
    ) -> None:
        """``masters``: of those that the network holds in half precision; their gradients are added
        up in float32 from here on. ``types``: those in which the weights are published, if they are
        not the network's."""
        self._held = trained_parameters(network)
        masters = masters or {}
        self.parameters = {name: masters.get(name, each) for name, each in self._held.items()}
        """Parameters of the optimizer, whole or sharded."""
        self.types = dict(types or {name: each.dtype for name, each in self._held.items()})
        """Types in which they are published, and a network that generates holds them."""
        for name, master in masters.items():
            self._held[name].register_post_accumulate_grad_hook(partial(_move_gradient, master))
        self.change: dict[str, Tensor] = {}
        """The encoded change that has made the newest version, if it was rounded."""

    @property
    def masters(self) -> dict[str, nn.Parameter]:
        """The weights that are published in another type than the one that is trained."""
        return {n: each for n, each in self.parameters.items() if each.dtype != self.types[n]}

    @property
    def stored(self) -> dict[str, Tensor]:
        """Weights that a stored version alone has: masters are in its checkpoint, and what is
        rounded of them follows."""
        return {n: each.detach() for n, each in self.parameters.items() if n not in self.masters}

    @property
    def held(self) -> dict[str, Tensor]:
        """Parameters of forward passes."""
        return {name: each.data for name, each in self._held.items()}

    def ahead_of(self, newest: Mapping[str, Tensor]) -> "TrainedWeights":
        """Return the same weights so that a step leaves ``newest`` as it is: masters themselves,
        which no pass reads, and copies of what has none."""
        ahead = copy.copy(self)
        ahead._held = {n: nn.Parameter(each.detach().clone()) for n, each in newest.items()}
        ahead.parameters = {
            name: ahead._held[name] if each is self._held[name] else each
            for name, each in self.parameters.items()
        }
        return ahead

    @torch.no_grad()
    def put_in_use(self, level: ChosenLevel = "exact", *, is_version: bool = True) -> None:
        """Round separate masters into the network, after the optimizer has changed them; ``level``:
        how the change to a version is rounded, where it is."""
        for name, parameter in self.parameters.items():
            if parameter is not self._held[name]:
                self._held[name].copy_(parameter)

    def settle(self) -> None:
        """Put a version in use whose weights and masters were read."""
        self.put_in_use()


class RoundedWeights(TrainedWeights):
    """An adapter whose versions are rounded changes of one another."""

    def __init__(self, network: nn.Module) -> None:
        held = trained_parameters(network)
        super().__init__(
            network, {name: nn.Parameter(each.detach().clone()) for name, each in held.items()}
        )
        self._version: dict[str, Tensor] = {}
        """The batch's version, between two of its updates."""

    @property
    def masters(self) -> dict[str, nn.Parameter]:
        return self.parameters

    @property
    def stored(self) -> dict[str, Tensor]:
        return self.held

    @torch.no_grad()
    def put_in_use(self, level: ChosenLevel = "exact", *, is_version: bool = True) -> None:
        self.change.clear()
        if not is_version:
            if not self._version:
                self._version |= {name: each.clone() for name, each in self.held.items()}
            super().put_in_use()
            return
        for name, tensor in self._version.items():
            self._held[name].copy_(tensor)
        self._version.clear()
        change = parameters_to_vector(self.parameters.values())
        change -= parameters_to_vector(self._held.values())
        if level == "exact" or level == "auto" or not change.isfinite().all():
            super().put_in_use()
            return
        self.change |= encode(change, level)
        add_flat(self._held.values(), decode(self.change, len(change)))

    def settle(self) -> None:
        self.change.clear()
        self._version.clear()
        torch.autograd.graph.increment_version(list(self._held.values()))


def _move_gradient(master: nn.Parameter, network_parameter: Tensor) -> None:
    """Adds the gradient of one pass to the master's; (a, b, ...) both."""
    assert network_parameter.grad is not None
    if master.grad is None:
        master.grad = network_parameter.grad.to(master.dtype)
    else:
        master.grad += network_parameter.grad
    network_parameter.grad = None


@dataclass(slots=True)
class MastersPlace(Place):
    """Puts masters next to a network whose weights are all trained."""

    def put(self, network: nn.Module) -> None:
        materialize(network, self.device)
        self.masters = {
            name: nn.Parameter(torch.empty_like(each, dtype=torch.float32))
            for name, each in trained_parameters(network).items()
            if is_half(each)
        }

    def targets(self, network: nn.Module) -> dict[str, Tensor]:
        return stored_tensors(network) | dict(self.masters)

    @torch.no_grad()
    def settle(self, network: nn.Module) -> None:
        parameters = trained_parameters(network)
        for name, master in self.masters.items():
            parameters[name].copy_(master)


@dataclass(slots=True)
class ShardsPlace(Place):
    """Puts a shard of a network on this rank; all ranks do it at the same time."""

    masters_of: torch.dtype | None = None
    """Type in which passes compute with float32 shards; without it, in the shards' own."""

    @property
    def share(self) -> float:
        return 1 / dist.get_world_size()

    def put(self, network: nn.Module) -> None:
        if self.masters_of is not None:
            self.types = {name: each.dtype for name, each in trained_parameters(network).items()}
        shard(network, ranks_mesh(self.device), passes_in=self.masters_of)
        materialize(network, self.device)
