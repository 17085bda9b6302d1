"""Linear layers with quantised weights.

Codes and scales are plain tensors. Such a layer therefore supports peft adapters, streaming,
gradient checkpointing and compilation like any other layer, and needs no package. Each product
dequantises its matrix and then frees it. The backward pass dequantises the matrix again, so that
the gradient of the input is exact. Generation and training of an adapter use the same weights.

Only matrices of the network's blocks are quantised. The other weights (embeddings, projections
from and to latents) are few, and errors in them affect every step. nf4 has the values of
bitsandbytes (Dettmers et al. 2023). Scales have the compute dtype of the layer.
"""

from itertools import product
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from shared.models.memory import NF4_GROUP, Form, is_block_matrix

MAX_CODES = {"int8": 127.0, "w8a8": 127.0, "fp8": 448.0, "nf4": 1.0}
"""Largest code of each form; code times scale is the largest weight of a row or group."""
NF4_VALUES = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
    -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
    0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941,
    0.7229568362236023, 1.0,
)  # fmt: skip
"""Codes of nf4: quantiles of a normal distribution."""
MIN_INT8_PRODUCT_ROWS = 17
"""Minimum number of rows for an integer matrix product on a GPU."""
INT8_SIZE_MULTIPLE = 8
"""Divisor of the matrix sizes that such a product supports."""
MIN_SCALE = 1e-30
"""Minimum scale, for rows of zeros."""

Size = tuple[int, int]


class QuantisedLinear(nn.Linear):
    """A linear layer that holds codes instead of weights; the codes are never trained."""

    form: Form
    scale: nn.Parameter
    """(rows, 1)"""
    values: Tensor | None
    """(256, 2): the two unscaled weights of each byte of nf4."""

    @property
    def compute_dtype(self) -> torch.dtype:
        """Returns the type of the dequantised weights; peft creates adapters in this type."""
        return self.scale.dtype

    @property
    def size(self) -> Size:
        return self.out_features, self.in_features

    def expect(self, form: Form) -> None:
        """Replaces uninitialised weights by uninitialised codes and scales."""
        device, dtype, rows = self.weight.device, self.weight.dtype, self.out_features
        codes, values = torch.empty(self.size, dtype=torch.int8, device=device), None
        if form == "nf4":
            rows = -(-self.weight.numel() // NF4_GROUP)
            codes = torch.empty(rows, NF4_GROUP // 2, dtype=torch.uint8, device=device)
            values = torch.tensor(list(product(NF4_VALUES, repeat=2)), dtype=dtype)
        self.form = form
        self.register_buffer("values", values, persistent=False)
        self.weight = nn.Parameter(codes, requires_grad=False)
        scale = torch.empty(rows, 1, dtype=dtype, device=device)
        self.scale = nn.Parameter(scale, requires_grad=False)

    @torch.no_grad()
    def hold(self, matrix: Tensor) -> None:
        """Quantises a matrix (out, in) and stores its codes and scales."""
        rows, largest = matrix.float(), MAX_CODES[self.form]
        if self.form == "nf4":
            padding = -matrix.numel() % NF4_GROUP
            rows = functional.pad(rows.flatten(), (0, padding)).view(-1, NF4_GROUP)
        scale = rows.abs().amax(1, keepdim=True) / largest
        self.scale.copy_(scale.clamp_min(torch.finfo(self.scale.dtype).tiny))
        # Divide by the rounded scales: the codes then compensate the rounding.
        self.weight.copy_(_codes((rows / self.scale.float()).clamp(-largest, largest), self.form))

    def forward(self, input: Tensor) -> Tensor:
        rows = input.reshape(-1, self.in_features)
        tensors = (self.weight, self.scale, self.values, self.form, self.size)
        if self.form == "w8a8" and _multiplies_integers(rows, self.size):
            product = _integer_product(rows, self.weight, self.scale, self.bias)
        elif torch.is_grad_enabled():
            product = _Product.apply(rows, self.bias, *tensors)  # type: ignore[no-untyped-call]
        else:
            product = functional.linear(rows, dequantised(*tensors), self.bias)
        return product.view(*input.shape[:-1], self.out_features)


class _Product(torch.autograd.Function):
    """Multiplies rows by a matrix that is dequantised in each pass and not saved for backward."""

    @staticmethod
    def forward(rows: Tensor, bias: Tensor | None, *tensors: Any) -> Tensor:
        return functional.linear(rows, dequantised(*tensors), bias)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _, _, codes, scale, values, *ctx.form_and_size = inputs
        ctx.save_for_backward(codes, scale, values)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        tensors = (*ctx.saved_tensors, *ctx.form_and_size)
        return gradient @ dequantised(*tensors), *[None] * (1 + len(tensors))


def _codes(scaled: Tensor, form: Form) -> Tensor:
    """Return the codes of weights (rows, n) that are scaled to at most `MAX_CODES`."""
    if form == "fp8":
        return scaled.to(torch.float8_e4m3fn).view(torch.int8)
    if form != "nf4":
        return scaled.round().to(torch.int8)
    values = torch.tensor(NF4_VALUES, device=scaled.device)
    nearest = torch.bucketize(scaled, (values[1:] + values[:-1]) / 2, out_int32=True)
    return (nearest[:, ::2] << 4 | nearest[:, 1::2]).to(torch.uint8)


def dequantised(
    codes: Tensor, scale: Tensor, values: Tensor | None, form: Form, size: Size
) -> Tensor:
    """Returns the weights (out, in) of codes and scales."""
    if values is not None:
        groups = functional.embedding(codes.int(), values).flatten(1).mul_(scale)
        return groups.flatten()[: size[0] * size[1]].view(size)
    if form == "fp8":
        return codes.view(torch.float8_e4m3fn).to(scale.dtype).mul_(scale)
    return codes * scale


def _multiplies_integers(rows: Tensor, size: Size) -> bool:
    """Whether a GPU supports the integer product of inputs (n, in) and a matrix."""
    return len(rows) >= MIN_INT8_PRODUCT_ROWS and not any(
        each % INT8_SIZE_MULTIPLE for each in size
    )


def _integer_product(rows: Tensor, codes: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
    """Quantises each row of the inputs (n, in), and multiplies integer codes: (n, out)."""
    own = (rows.abs().amax(1, keepdim=True).float() / MAX_CODES["w8a8"]).clamp_min(MIN_SCALE)
    sums = torch._int_mm((rows / own).round().to(torch.int8).contiguous(), codes.t())
    product = (sums * own).mul_(scale.t()).to(rows.dtype)
    return product if bias is None else product + bias


def quantise_blocks(network: nn.Module, form: Form | None) -> None:
    """Replaces the uninitialised matrices of a network's blocks by quantised layers."""
    for name, module in network.named_modules() if form in MAX_CODES else ():
        if type(module) is nn.Linear and is_block_matrix(f"{name}.weight", module.weight.shape):
            module.__class__ = QuantisedLinear
            cast(QuantisedLinear, module).expect(cast(Form, form))


def quantised_layers(network: nn.Module) -> dict[str, QuantisedLinear]:
    """Returns the quantised layers by name."""
    modules = dict(network.named_modules())
    return {name: each for name, each in modules.items() if isinstance(each, QuantisedLinear)}
