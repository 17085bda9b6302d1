"""The two sums of a gradient whose advantages are only centred: what is in proportion to them, and
all else.

The first is in the ``grad`` fields, the second here until the optimizer step, which knows the
factor of the first. Where both travel together, names say which is which.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

REST = "rest/"
"""Begins the names of the gradients that do not depend on the advantages."""


@dataclass(slots=True)
class Rest:
    """Sums the gradient of what does not depend on the advantages."""

    gradients: dict[str, Tensor] = field(default_factory=dict)
    """Gradients by the names of their parameters, of the same shapes; none as long as there is
    nothing to sum."""

    @contextmanager
    def taking(self, parameters: Mapping[str, nn.Parameter]) -> Iterator[None]:
        """Makes backward passes add to these gradients, and not to the ``grad`` fields."""
        kept = {name: each.grad for name, each in parameters.items()}
        for name, each in parameters.items():
            each.grad = self.gradients.get(name)
        try:
            yield
        finally:
            for name, each in parameters.items():
                if each.grad is not None:
                    self.gradients[name] = each.grad
                each.grad = kept[name]

    @torch.no_grad()
    def add(self, gradients: Mapping[str, Tensor]) -> None:
        """Adds gradients, each on the device where the sum shall be."""
        for name, tensor in gradients.items():
            held = self.gradients.get(name)
            self.gradients[name] = tensor.clone() if held is None else held.add_(tensor)

    @torch.no_grad()
    def join(self, parameters: Mapping[str, nn.Parameter], scale: float, own: float) -> None:
        """Multiplies the ``grad`` fields, all of which are there, by ``scale``, and adds ``own``
        times these gradients, of which none are left."""
        for name, parameter in parameters.items():
            assert parameter.grad is not None
            if scale != 1.0:
                parameter.grad.mul_(scale)
            if name in self.gradients:
                parameter.grad.add_(self.gradients[name], alpha=own)
        self.gradients.clear()

    def named(self) -> dict[str, Tensor]:
        """Returns the gradients by the names that they travel under."""
        return {REST + name: each for name, each in self.gradients.items()}


@torch.no_grad()
def add_gradients(parameters: Mapping[str, nn.Parameter], gradients: Mapping[str, Tensor]) -> None:
    """Adds gradients, of their parameters' shapes and on any device, to the ``grad`` fields."""
    for name, tensor in gradients.items():
        parameter = parameters[name]
        here = tensor.to(parameter.device)
        parameter.grad = here.clone() if parameter.grad is None else parameter.grad.add_(here)


def of_rest(gradients: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns those of the gradients that do not depend on advantages, by their parameters."""
    return {name.removeprefix(REST): t for name, t in gradients.items() if name.startswith(REST)}


def in_proportion(gradients: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns those of the gradients that are in proportion to the advantages."""
    return {name: tensor for name, tensor in gradients.items() if not name.startswith(REST)}
