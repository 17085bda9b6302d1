"""A second set of trained weights of one network, beside those that it holds.

Where one policy generates and another is trained, a device that trains has both: its network holds
the trained weights, and beside them lie those that generate. They change places by exchanging
pointers, so that neither is ever copied, and no gradient is touched. The device must be held by
whoever exchanges them.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from shared.diffusion.weights import trained_parameters


class WeightsBeside:
    """Empty until `keep`: the policy that generates is then the one that is trained."""

    def __init__(self, network: nn.Module) -> None:
        self._parameters = trained_parameters(network)
        self.tensors: dict[str, Tensor] = {}
        """Weights by exported name, of the parameters' shapes, on their device."""
        self.differ = False
        """Whether they are others than those that the network holds."""

    @classmethod
    @torch.no_grad()
    def of(cls, network: nn.Module, tensors: Mapping[str, Tensor]) -> "WeightsBeside":
        """Let copies of these tensors lie beside a network, and stay as they are."""
        made = cls(network)
        made.tensors = {
            name: tensors[name].detach().to(each.device, copy=True)
            for name, each in made._parameters.items()
        }
        made.differ = True
        return made

    @torch.no_grad()
    def keep(self) -> None:
        """Copy what the network holds: from here on these weights stay, whatever it is trained
        to."""
        self.tensors = {name: each.detach().clone() for name, each in self._parameters.items()}
        self.differ = False

    def forget(self) -> None:
        self.tensors, self.differ = {}, False

    @torch.no_grad()
    def follow(self, decay: float) -> None:
        """Move these weights towards those that the network holds: decay x these + (1 - decay) x
        those."""
        for name, tensor in self.tensors.items():
            if decay:
                tensor.mul_(decay).add_(self._parameters[name], alpha=1 - decay)
            else:
                tensor.copy_(self._parameters[name])
        self._changed(differ=decay > 0)

    @torch.no_grad()
    def copy(self, other: "WeightsBeside") -> None:
        """Take over the weights that lie beside another device's network."""
        for name, tensor in self.tensors.items():
            tensor.copy_(other.tensors[name])
        self._changed(differ=other.differ)

    @torch.no_grad()
    def compare(self) -> None:
        """Look whether these weights, which were written in place, differ from the network's."""
        same = (torch.equal(each, self._parameters[n]) for n, each in self.tensors.items())
        self._changed(differ=not all(same))

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Have the network use these weights meanwhile, if they differ, without gradients."""
        if not self.differ:
            yield
            return
        self._exchange()
        try:
            yield
        finally:
            self._exchange()

    def _exchange(self) -> None:
        for name, parameter in self._parameters.items():
            held = parameter.data
            parameter.data = self.tensors[name]
            self.tensors[name] = held

    def _changed(self, *, differ: bool) -> None:
        self.differ = differ
        # Written in place: whoever watches the parameters must see a new version of either set.
        torch.autograd.graph.increment_version(list(self._parameters.values()))
