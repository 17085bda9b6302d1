"""The checksum sees every bit of every tensor, and nothing of how they are stored."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from shared.diffusion.weights import checksum as module
from shared.diffusion.weights.checksum import checksum
from shared.diffusion.weights.trained_weights import weights_digest


def tensors() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {
        "a": torch.randn(70, 300, generator=generator),
        "b": torch.randn(33, generator=generator).to(torch.bfloat16),
        "c": torch.randn(5, generator=generator, dtype=torch.float64),
        "empty": torch.zeros(0),
    }


def test_equal_tensors_have_one_checksum_however_they_lie() -> None:
    one, other = tensors(), tensors()
    other["a"] = other["a"].t().contiguous().t()
    assert checksum(one) == checksum(dict(reversed(other.items())))
    assert len(checksum(one).hex) == 32
    assert weights_digest(one) == checksum(one).digest


@given(name=st.sampled_from(["a", "b", "c"]), place=st.integers(0, 10**6), bit=st.integers(0, 63))
def test_every_single_bit_counts(name: str, place: int, bit: int) -> None:
    before, changed = tensors(), tensors()
    word = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    bits = changed[name].reshape(-1).view(word[changed[name].element_size()])
    width = 8 * changed[name].element_size()
    flipped = 1 << (bit % width)
    bits[place % len(bits)] ^= flipped - (1 << width) if flipped >> (width - 1) else flipped
    assert checksum(before) != checksum(changed)


def swapped(found: dict[str, Tensor]) -> None:
    found["a"][:, [0, 1]] = found["a"][:, [1, 0]]


def two_signs(found: dict[str, Tensor]) -> None:
    found["a"][3, 4:6] *= -1


def renamed(found: dict[str, Tensor]) -> None:
    found["z"] = found.pop("a")


def reshaped(found: dict[str, Tensor]) -> None:
    found["a"] = found["a"].reshape(300, 70)


def longer(found: dict[str, Tensor]) -> None:
    found["c"] = torch.cat([found["c"], torch.zeros(1, dtype=torch.float64)])


@pytest.mark.parametrize("change", [swapped, two_signs, renamed, reshaped, longer])
def test_what_is_moved_renamed_or_longer_counts(
    change: Callable[[dict[str, Tensor]], None],
) -> None:
    changed = tensors()
    change(changed)
    assert checksum(tensors()) != checksum(changed)


def test_pieces_that_are_mixed_at_a_time_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    found = checksum(tensors())
    monkeypatch.setattr(module, "MAX_WORDS_AT_ONCE", module.ROW)
    assert checksum(tensors()) == found


def test_it_is_the_same_for_ever() -> None:
    counted = {"a": torch.arange(40_000, dtype=torch.float32), "b": torch.ones(3)}
    assert checksum(counted).hex == "68935daa7f3883c3bca0b2204b16420a"
