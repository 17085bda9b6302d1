"""A layer with an adapter computes what peft's does, and takes fewer calls for it."""

import copy
from typing import Any

import pytest
import torch
from peft import LoraConfig, inject_adapter_in_model
from peft.tuners.lora.layer import Linear
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from digenrl.trace.launches import is_launch
from shared.diffusion.weights.adapted_layer import AdaptedLinear, adapt_in_fewer_calls


class Calls(TorchDispatchMode):
    """Counts calls that compute: views cost no kernel."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.number = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        self.number += is_launch(func)
        return func(*args, **(kwargs or {}))


def both(dtype: torch.dtype, alpha: float) -> tuple[nn.Sequential, nn.Sequential]:
    """peft's network, and one that is the same but for the class of its layers."""
    torch.manual_seed(1)
    network = nn.Sequential(nn.Linear(24, 16), nn.GELU(), nn.Linear(16, 8)).to(dtype)
    network.requires_grad_(False)
    config = LoraConfig(r=4, lora_alpha=alpha, target_modules=["0", "2"], init_lora_weights=False)
    inject_adapter_in_model(config, network)
    for name, each in network.named_parameters():
        if "lora_" in name:
            each.data = each.data.float()
    ours = copy.deepcopy(network)
    adapt_in_fewer_calls(ours)
    assert [type(each) for each in (network[0], ours[0])] == [Linear, AdaptedLinear]
    return network, ours


def taken(network: nn.Module, x: Tensor) -> list[Tensor]:
    """Returns the output, and the gradients of the adapter and the input."""
    x = x.clone().requires_grad_()
    found = network(x)
    wanted = [each for each in network.parameters() if each.requires_grad]
    return [found, *torch.autograd.grad((found.float() ** 2).sum(), [*wanted, x])]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_computes_the_same_bits_where_the_scale_is_a_power_of_two(dtype: torch.dtype) -> None:
    theirs, ours = both(dtype, alpha=8.0)
    x = torch.randn(5, 3, 24).to(dtype)
    for mine, other in zip(taken(ours, x), taken(theirs, x), strict=True):
        assert mine.dtype == other.dtype and torch.equal(mine, other)
    for network in (theirs, ours):
        layer: Any = network[0]
        assert not torch.equal(layer(x), layer.base_layer(x)), "the adapter adds something"


def test_it_computes_the_same_but_for_rounding_with_any_scale() -> None:
    theirs, ours = both(torch.float32, alpha=7.0)
    x = torch.randn(5, 24)
    for mine, other in zip(taken(ours, x), taken(theirs, x), strict=True):
        assert torch.allclose(mine, other, rtol=1e-5, atol=1e-6)


def test_it_takes_four_calls_instead_of_six() -> None:
    numbers, x = [], torch.randn(2, 24, dtype=torch.bfloat16)
    for network in both(torch.bfloat16, alpha=8.0):
        with torch.no_grad(), Calls() as calls:
            network[0](x)
        numbers.append(calls.number)
    assert numbers == [7, 5], "with the product of the layer itself"


def test_without_its_adapter_or_with_it_merged_it_is_pefts() -> None:
    theirs, ours = both(torch.float32, alpha=8.0)
    x = torch.randn(5, 24)
    for change in ("disable", "merge"):
        for network in (theirs, ours):
            layer: Any = network[0]
            layer.enable_adapters(change == "merge")
            if change == "merge":
                layer.merge()
        assert torch.equal(theirs(x), ours(x))


class Attention(nn.Module):
    def __init__(self, dtype: torch.dtype, *, is_cross: bool) -> None:
        super().__init__()
        self.is_cross_attention = is_cross
        for name in ("to_q", "to_k", "to_v"):
            setattr(self, name, nn.Linear(24, 16).to(dtype).requires_grad_(False))

    def forward(self, x: Tensor) -> Tensor:
        other = x + 1 if self.is_cross_attention else x
        found: Tensor = self.to_q(x) + self.to_k(other) * self.to_v(other)  # type: ignore[operator]
        return found


@pytest.mark.parametrize(("is_cross", "saved"), [(False, 3), (True, 1)])
def test_layers_that_read_one_input_multiply_it_at_once(is_cross: bool, saved: int) -> None:
    """Nine calls instead of twelve for three layers, and seven instead of eight for two."""
    torch.manual_seed(1)
    joint = Attention(torch.bfloat16, is_cross=is_cross)
    config = LoraConfig(r=4, lora_alpha=8, target_modules=["to_q", "to_k", "to_v"])
    inject_adapter_in_model(config, joint)
    for name, weights in joint.named_parameters():
        if "lora_" in name:
            weights.data = 0.1 * torch.randn(weights.shape)
    apart = copy.deepcopy(joint)
    for network in (joint, apart):
        adapt_in_fewer_calls(network)
    for each in apart.modules():
        if isinstance(each, AdaptedLinear):
            each.first_products = None
    x, numbers = torch.randn(5, 3, 24), []
    for network in (apart, joint):
        with torch.no_grad(), Calls() as calls:
            network(x.bfloat16())
        numbers.append(calls.number)
        assert joint.to_k.first_products._input is None, "nothing is kept"  # type: ignore[union-attr]
    assert numbers[0] - numbers[1] == saved
    for mine, other in zip(taken(joint.float(), x), taken(apart.float(), x), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-5)
