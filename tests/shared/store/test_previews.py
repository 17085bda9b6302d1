"""Small pictures of samples: of every kind of media, small, and read without trust."""

import io

import msgpack
import numpy as np
import pytest
import safetensors.numpy
from PIL import Image

from shared.errors import ContractError
from shared.store.previews import MAX_SIDE, content_type, pack_previews, unpack_previews

MOST = 8192


def previews_of(*shape: int) -> list[bytes]:
    noise = np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)
    raw = safetensors.numpy.save({"images": noise})
    return unpack_previews(pack_previews(raw, MOST))


@pytest.mark.parametrize(
    ("shape", "size"),
    [
        ((2, 1, 28, 28), (28, 28)),
        ((1, 3, 8, 20), (20, 8)),
        ((2, 3, 512, 256), (MAX_SIDE // 2, MAX_SIDE)),
        ((1, 5, 3, 64, 320), (MAX_SIDE, MAX_SIDE // 5)),
    ],
)
def test_even_of_noise_a_preview_is_small(shape: tuple[int, ...], size: tuple[int, int]) -> None:
    found = previews_of(*shape)
    assert len(found) == shape[0]
    for each in found:
        assert len(each) <= MOST
        assert Image.open(io.BytesIO(each)).size == size


def test_of_a_video_it_is_the_middle_frame_and_a_small_picture_stays_as_it_is() -> None:
    video = np.zeros((1, 3, 1, 4, 4), np.uint8)
    video[0, 1] = 77
    [found] = unpack_previews(pack_previews(safetensors.numpy.save({"images": video}), MOST))
    assert content_type(found) == "image/png"
    assert Image.open(io.BytesIO(found)).getpixel((2, 2)) == 77


@pytest.mark.parametrize("data", [b"", b"<svg>", msgpack.packb({}), msgpack.packb([b"<svg>"])])
def test_nothing_else_is_taken_for_previews(data: bytes) -> None:
    with pytest.raises(ContractError):
        unpack_previews(data)
