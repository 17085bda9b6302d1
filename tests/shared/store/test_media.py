"""Media come back as they were, to the bit, and nothing too large is ever unpacked."""

import zlib
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from services.reward.scoring import MediaSize, read_media
from shared.errors import ContractError
from shared.store.media import PACKED, SHAPE, Media, pack

SIDE = st.integers(1, 6)
SHAPES = st.one_of(
    st.tuples(st.integers(1, 3), st.sampled_from([1, 3, 4]), SIDE, SIDE),
    st.tuples(st.integers(1, 2), st.integers(1, 3), st.sampled_from([1, 3, 4]), SIDE, SIDE),
)


def raw(media: Media) -> bytes:
    return safetensors.numpy.save({"images": media})


def smooth(num: int, frames: int = 1, side: int = 64) -> Media:
    """Coloured waves with some noise, (num, [frames,] 3, side, side)."""
    rows, columns = np.mgrid[0:side, 0:side] / side
    noise = np.random.default_rng(0)
    made = [
        127
        + 90 * np.sin(3 * columns + 2 * rows + colour + each / 9)
        + noise.normal(0, 1, (side,) * 2)
        for each in range(num * frames)
        for colour in range(3)
    ]
    shape = (num, frames, 3, side, side) if frames > 1 else (num, 3, side, side)
    return np.asarray(made).clip(0, 255).astype(np.uint8).reshape(shape)


def packed(shape: tuple[int, ...], data: bytes, **other: Any) -> bytes:
    tensors: dict[str, Any] = {
        PACKED: np.frombuffer(data, np.uint8), SHAPE: np.array(shape, np.int64)
    }  # fmt: skip
    return safetensors.numpy.save({**tensors, **other})


@given(SHAPES.flatmap(lambda shape: arrays.arrays(np.uint8, shape)))
def test_any_pixels_come_back_as_they_were(media: Media) -> None:
    np.testing.assert_array_equal(read_media(pack(raw(media)), len(media)), media)


@pytest.mark.parametrize("frames", [1, 5])
def test_smooth_media_take_less_than_half_and_are_the_same_to_the_bit(frames: int) -> None:
    media = smooth(3, frames)
    small = pack(raw(media))
    assert len(small) < 0.5 * media.nbytes
    size = MediaSize(height=64, width=64, frames=frames)
    np.testing.assert_array_equal(read_media(small, 3, size), media)
    np.testing.assert_array_equal(read_media(raw(media), 3, size), media)


def test_what_would_not_be_smaller_stays_as_it_is() -> None:
    noise = np.random.default_rng(0).integers(0, 256, (2, 3, 8, 8), np.uint8)
    assert pack(raw(noise)) == raw(noise)


def test_nothing_is_unpacked_that_is_not_of_the_recipes_size(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    unpacked: list[object] = []
    monkeypatch.setattr("shared.store.media._unpack", lambda *what: unpacked.append(what))
    bomb = packed((1, 3, 2500, 2500), zlib.compress(b"0" * 20_000_000))
    with pytest.raises(ContractError, match="the recipe makes 64 x 64 pixels"):
        read_media(bomb, 1, MediaSize(height=64, width=64))
    with pytest.raises(ContractError, match="bytes cannot hold media of shape"):
        read_media(packed((1, 3, 1 << 20, 1 << 20), b"12345"), 1)
    with pytest.raises(ContractError, match="do not fit 2 samples"):
        read_media(pack(raw(smooth(1))), 2)
    assert unpacked == []


PIXELS = bytes(range(12))
WHOLE = zlib.compress(PIXELS)


@pytest.mark.parametrize(
    "data",
    [
        packed((1, 3, 2, 2), WHOLE[:-1]),
        packed((1, 3, 2, 2), zlib.compress(PIXELS + b"more")),
        packed((1, 3, 2, 2), zlib.compress(PIXELS[:-1])),
        packed((1, 3, 2, 2), WHOLE + b"more"),
        packed((1, 3, 2, 2), b"no stream of zlib"),
        packed((1, 3, 2), WHOLE),
        packed((1, -3, -2, 2), WHOLE),
        safetensors.numpy.save({PACKED: np.frombuffer(WHOLE, np.uint8)}),
        safetensors.numpy.save({"images": np.zeros((1, 3, 2, 2), np.int64)}),
        packed((1, 3, 2, 2), WHOLE)[:-3],
    ],
    ids=["cut off", "too long", "too short", "followed", "no stream", "three dimensions",
         "negative", "no shape", "of another type", "object cut off"],
)  # fmt: skip
def test_what_is_no_media_is_refused(data: bytes) -> None:
    with pytest.raises(ContractError):
        read_media(data, 1)
