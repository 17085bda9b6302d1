"""Rounds flat float32 tensors to 8 or 4 bits per number for transfers over slow lines.

Each block of 64 numbers has one scale, a power of two: numbers are codes times 2^exponent. Products
with a power of two are exact, so all devices decode the same bits, and rounding is idempotent. The
error is at most half of the scale. The caller adds the residual to the next tensor (error
feedback).
"""

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from shared.errors import ContractError
from shared.messages.records import Level

BLOCK = 64
MAX_CODE = {"int8": 127, "int4": 7}
CODES, EXPONENTS = "codes", "exponents"
MIN_EXPONENT, MAX_EXPONENT = -100, 120
"""Range in which scales, their inverses and all numbers are normal numbers of float32."""
EXPONENT_BIAS, MANTISSA_BITS = 127, 23

Encoded = Mapping[str, Tensor]
"""``codes``: (blocks, 64) int8, or (blocks, 32) uint8 with two codes each; ``exponents``: (blocks,)
int8."""


@torch.no_grad()
def encode(flat: Tensor, level: Level) -> Encoded:
    """Round a tensor (n,) of finite numbers; not for the level ``exact``."""
    max_code = MAX_CODE[level]
    blocks = torch.nn.functional.pad(flat, (0, -len(flat) % BLOCK)).view(-1, BLOCK)
    largest = blocks.abs().amax(1)
    exponents = torch.frexp(largest / (max_code + 0.5)).exponent
    exponents = exponents.clamp(MIN_EXPONENT, MAX_EXPONENT)
    codes = (blocks * _power_of_two(-exponents)[:, None]).round_().clamp_(-max_code, max_code)
    if level == "int4":
        high, low = (codes + max_code + 1).to(torch.uint8).view(-1, BLOCK // 2, 2).unbind(2)
        return {CODES: high * 16 + low, EXPONENTS: exponents.to(torch.int8)}
    return {CODES: codes.to(torch.int8), EXPONENTS: exponents.to(torch.int8)}


@torch.no_grad()
def decode(encoded: Encoded, size: int) -> Tensor:
    """Return the rounded numbers (size,).

    Raises:
        ContractError: if ``encoded`` is not a tensor of this size in either format.
    """
    blocks, shapes = -(-size // BLOCK), {n: (tuple(t.shape), t.dtype) for n, t in encoded.items()}
    scales = ((blocks,), torch.int8)
    formats = [((blocks, BLOCK), torch.int8), ((blocks, BLOCK // 2), torch.uint8)]
    if size < 1 or shapes not in [{CODES: each, EXPONENTS: scales} for each in formats]:
        raise ContractError(f"not an encoded tensor of {size} numbers: {str(shapes)[:200]}")
    codes, exponents = encoded[CODES], encoded[EXPONENTS]
    if exponents.min() < MIN_EXPONENT or exponents.max() > MAX_EXPONENT:
        raise ContractError("the encoded tensor has numbers that are not finite")
    if codes.dtype == torch.uint8:
        halves = torch.stack((codes // 16, codes % 16), 2).view(-1, BLOCK)
        codes = halves.to(torch.int8) - (MAX_CODE["int4"] + 1)
    return (codes * _power_of_two(exponents)[:, None]).view(-1)[:size]


def rounded(flat: Tensor, level: Level) -> Tensor:
    """Return the numbers (n,) after encoding and decoding."""
    return flat if level == "exact" else decode(encode(flat, level), len(flat))


def _power_of_two(exponents: Tensor) -> Tensor:
    """Return 2^exponent by its bits: a kernel for powers need not be exact."""
    return ((exponents.to(torch.int32) + EXPONENT_BIAS) << MANTISSA_BITS).view(torch.float32)


@torch.no_grad()
def add_flat(tensors: Iterable[Tensor], change: Tensor) -> None:
    """Add a flat change to tensors in place, in their order."""
    targets = list(tensors)
    parts = change.split([each.numel() for each in targets])
    for target, part in zip(targets, parts, strict=True):
        target.add_(part.view(target.shape).to(target.device))
