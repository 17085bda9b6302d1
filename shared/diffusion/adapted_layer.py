"""The forward pass of a layer with an adapter, in fewer calls than peft's.

A GPU computes a small fragment's step faster than its host can launch the kernels of it, and two of
five are the adapter's: for each layer peft casts the input, multiplies twice, scales, adds and
rounds the sum. Here one kernel scales, adds and rounds, in place: four instead of six.
"""

from typing import Any

from peft.tuners.lora.layer import Linear
from torch import Tensor, nn


class AdaptedLinear(Linear):  # type: ignore[misc]
    """peft's layer, with the same result: to the last bit where the scale is a power of two."""

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        active = self.active_adapters
        is_plain = len(active) == 1 and active[0] in self.lora_A and not self.lora_variant
        if self.disable_adapters or self.merged or args or kwargs or not is_plain:
            found: Tensor = super().forward(x, *args, **kwargs)
            return found
        name = active[0]
        first = self.lora_A[name]
        added = self.lora_B[name](first(x.to(first.weight.dtype)))
        result: Tensor = self.base_layer(x)
        return result.add_(added, alpha=self.scaling[name])


def adapt_in_fewer_calls(network: nn.Module) -> None:
    """Gives peft's plain layers this forward pass; those of quantised weights keep their own."""
    for module in network.modules():
        if type(module) is Linear:
            module.__class__ = AdaptedLinear
