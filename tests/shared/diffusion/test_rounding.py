"""Rounded numbers: what a reader finds, how far off it is, and what is refused."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from shared.diffusion.weights.rounding import BLOCK, MAX_CODE, decode, encode, rounded
from shared.errors import ContractError
from shared.messages.records import Level

LEVELS: tuple[Level, ...] = ("int8", "int4")


@st.composite
def flats(draw: st.DrawFn) -> Tensor:
    """Numbers of many magnitudes, with zeros and whole blocks of zeros."""
    size, seed = draw(st.integers(1, 300)), draw(st.integers(0, 2**31))
    drawn = torch.Generator().manual_seed(seed)
    exponents = draw(st.integers(-60, 60)) + torch.randint(-8, 8, (size,), generator=drawn)
    found = torch.randn(size, generator=drawn) * 2.0**exponents
    return found * (torch.rand(size, generator=drawn) < draw(st.sampled_from((0.0, 0.5, 1.0))))


@pytest.mark.parametrize("level", LEVELS)
@given(flats())
def test_an_error_is_at_most_half_a_step_of_its_block(level: Level, flat: Tensor) -> None:
    found = rounded(flat, level)
    for numbers, errors in zip(flat.split(BLOCK), (flat - found).split(BLOCK), strict=True):
        step = 2 * numbers.abs().max() / (MAX_CODE[level] + 0.5)
        assert errors.abs().max() <= step / 2


@pytest.mark.parametrize("level", LEVELS)
@given(flats())
def test_rounding_what_was_rounded_changes_no_bit(level: Level, flat: Tensor) -> None:
    once = rounded(flat, level)
    assert torch.equal(rounded(once, level), once)


@pytest.mark.parametrize("level", LEVELS)
@given(flats())
def test_a_number_is_what_was_rounded_and_what_is_left_exactly(level: Level, flat: Tensor) -> None:
    found = rounded(flat, level)
    assert torch.equal(found + (flat - found), flat)


@pytest.mark.parametrize("level", LEVELS)
@given(flats(), st.integers(2, 20))
def test_with_what_was_left_added_each_time_a_sum_is_off_by_one_step(
    level: Level, flat: Tensor, times: int
) -> None:
    left, total = torch.zeros_like(flat), torch.zeros_like(flat, dtype=torch.float64)
    for _ in range(times):
        sent = rounded(flat + left, level)
        left, total = flat + left - sent, total + sent.double()
    for numbers, errors in zip(
        flat.split(BLOCK), (times * flat.double() - total).split(BLOCK), strict=True
    ):
        assert errors.abs().max() <= 2 * numbers.abs().max() / MAX_CODE[level] + 1e-5 * times * (
            numbers.abs().max()
        )


@pytest.mark.parametrize(("level", "most"), [("int8", 0.26), ("int4", 0.135)])
def test_rounded_numbers_take_a_quarter_or_an_eighth_of_the_bytes(
    level: Level, most: float
) -> None:
    flat = torch.randn(100 * BLOCK)
    size = sum(each.numel() * each.element_size() for each in encode(flat, level).values())
    assert size <= most * 4 * len(flat)


@pytest.mark.parametrize(
    "change",
    [
        lambda found: found | {"exponents": found["exponents"] + 127},
        lambda found: found | {"exponents": found["exponents"].to(torch.int16)},
        lambda found: found | {"codes": found["codes"][:1]},
        lambda found: found | {"codes": found["codes"].to(torch.float32)},
        lambda found: {"codes": found["codes"]},
        lambda found: found | {"more": found["codes"]},
    ],
)
def test_what_is_no_rounded_tensor_of_this_size_is_refused(change: object) -> None:
    assert callable(change)
    found = dict(encode(torch.ones(3 * BLOCK), "int8"))
    with pytest.raises(ContractError, match="encoded tensor"):
        decode(change(found), 3 * BLOCK)


@pytest.mark.parametrize("size", [0, -5, -3 * BLOCK, 10**30])
def test_a_rounded_tensor_of_no_size_is_refused(size: int) -> None:
    found = {"codes": torch.zeros(0, BLOCK, dtype=torch.int8)}
    with pytest.raises(ContractError, match="encoded tensor"):
        decode(found | {"exponents": torch.zeros(0, dtype=torch.int8)}, size)
