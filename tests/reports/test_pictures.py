"""Source images as people have them: alpha, palettes, rotation, WebP, and what is no image."""

import io
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from PIL import Image

from shared.errors import ContractError
from shared.learning.pictures import check_picture, decoded

S = 32
RGB = Image.new("RGB", (S, S), (200, 30, 30))
ROTATED = Image.Exif()
ROTATED[0x112] = 6
TWO = np.zeros((S, 2 * S, 3), np.uint8)
TWO[:, :S], TWO[:, S:] = (255, 0, 0), (0, 0, 255)


def saved(picture: Any, kind: str = "PNG", **options: Any) -> bytes:
    out = io.BytesIO()
    (picture if isinstance(picture, Image.Image) else Image.fromarray(picture)).save(
        out, kind, **options
    )
    return out.getvalue()


def cut_out(hidden: Any) -> Any:
    """A red square in the middle of what is transparent, over a hidden colour."""
    pixels = np.zeros((S, S, 4), np.uint8)
    pixels[..., :3] = hidden
    pixels[8:24, 8:24] = (200, 30, 30, 255)
    return pixels


NOISE = np.random.default_rng(0).integers(0, 255, (S, S, 3))
PALETTE = Image.fromarray(cut_out(0)).convert("P")
TRANSPARENT: Mapping[str, bytes] = {
    "hidden black": saved(cut_out(0)),
    "hidden white": saved(cut_out(255)),
    "hidden noise": saved(cut_out(NOISE)),
    "webp": saved(cut_out(NOISE), "WEBP", lossless=True, exact=True),
    "gray with alpha": saved(Image.fromarray(cut_out(0)).convert("LA")),
    "palette": saved(PALETTE, transparency=PALETTE.getpixel((0, 0))),
}


@pytest.mark.parametrize(
    ("background", "colour"), [("white", 255), ("black", 0), ("gray", 128), ("#102030", None)]
)
@pytest.mark.parametrize("name", TRANSPARENT)
def test_a_transparent_image_has_the_background_not_its_hidden_colour(
    name: str, background: str, colour: int | None
) -> None:
    found = decoded(TRANSPARENT[name], height=S, width=S, channels=3, background=background)
    wanted = [0x10, 0x20, 0x30] if colour is None else [colour] * 3
    assert found[:, 1, 1].tolist() == wanted
    assert abs(int(found[0, 16, 16]) - (81 if name.startswith("gray") else 200)) < 4
    default = decoded(TRANSPARENT[name], height=S, width=S, channels=1)
    assert default[0, 1, 1] == 255


def test_what_is_half_transparent_is_mixed() -> None:
    half = np.zeros((S, S, 4), np.uint8)
    half[:] = (255, 0, 0, 128)
    found = decoded(saved(half), height=S, width=S, channels=3)
    assert found[:, 1, 1].tolist() == [255, 127, 127]


@pytest.mark.parametrize(
    "data",
    [
        saved(RGB, "WEBP"),
        saved(RGB, "WEBP", lossless=True),
        saved(RGB, "WEBP", exif=ROTATED),
        saved(RGB, "WEBP", save_all=True, append_images=[Image.new("RGB", (S, S))]),
        saved(RGB.convert("CMYK"), "JPEG"),
        saved(RGB, "JPEG", progressive=True),
        saved(RGB, save_all=True, append_images=[Image.new("RGB", (S, S))]),
        saved(RGB, "JPEG") + bytes(100),
    ],
    ids=["webp", "lossless", "webp of three chunks", "animated webp", "cmyk", "progressive",
         "apng", "trailing bytes"],
)  # fmt: skip
def test_it_is_read(data: bytes) -> None:
    assert check_picture(data) == (S, S)
    found = decoded(data, height=S, width=S, channels=3)
    np.testing.assert_allclose(found[:, 16, 16], (200, 30, 30), atol=12)


@pytest.mark.parametrize("options", [{}, {"lossless": True}, {"exif": ROTATED}])
def test_the_header_of_a_webp_says_its_size(options: Mapping[str, Any]) -> None:
    for height, width in ((7, 500), (1234, 16), (300, 301)):
        picture = Image.fromarray(np.zeros((height, width, 3), np.uint8))
        data = saved(picture, "WEBP", **options)
        assert check_picture(data) == (height, width)
        for lost in (1, len(data) // 2):
            with pytest.raises(ContractError, match="damaged"):
                check_picture(data[:-lost])


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP"])
def test_it_is_upright(kind: str) -> None:
    found = decoded(saved(TWO, kind, exif=ROTATED), height=2 * S, width=S, channels=3)
    assert found[0, 2, 16] > 240 and found[2, -3, 16] > 240


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (saved(RGB, "GIF"), "has another format than PNG, JPEG or WebP; convert it"),
        (saved(RGB, "BMP"), "has another format than PNG"),
        (saved(RGB, "TIFF"), "has another format than PNG"),
        (b"<html>404</html>", "has another format than PNG"),
        (b"", "has another format than PNG"),
        (saved(np.full((S, S), 40000, np.uint16)), "16 bits per channel"),
        (saved(Image.new("RGB", (2, 2))), "sides may be 4 to"),
        (saved(Image.effect_noise((256, 256), 90))[:-4000], "broken off"),
        (b"RIFF\x10\0\0\0WEBPXXXX" + bytes(30), "damaged WebP"),
    ],
)
def test_it_is_refused_with_the_remedy(data: bytes, said: str) -> None:
    with pytest.raises(ContractError, match=said):
        check_picture(data)
