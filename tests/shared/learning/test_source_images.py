"""Source images of prompts: what is taken at the door, and what becomes of it."""

import io
import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from shared.errors import ContractError, UserError
from shared.learning.pictures import check_picture, decoded
from shared.learning.prompts import digest, read_prompts, read_rows, source_digests
from shared.limits import MAX_PICTURE_BYTES
from shared.messages.codec import decode, encode
from shared.run.files import record_file
from tests import examples


def as_file(width: int, height: int, kind: str = "PNG", mode: str = "RGB") -> bytes:
    out = io.BytesIO()
    pixels = np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8)
    Image.fromarray(pixels).convert(mode).save(out, format=kind)
    return out.getvalue()


@pytest.mark.parametrize(("kind", "mode"), [("PNG", "RGB"), ("JPEG", "RGB"), ("PNG", "L")])
def test_the_header_says_the_size(kind: str, mode: str) -> None:
    data = as_file(20, 12, kind, mode)
    assert check_picture(data) == (12, 20)
    assert decoded(data, height=12, width=20, channels=3).shape == (3, 12, 20)


def test_a_picture_is_scaled_and_cropped_at_its_middle() -> None:
    out = io.BytesIO()
    pixels = np.zeros((8, 24, 3), np.uint8)
    pixels[:, 8:16] = 255
    Image.fromarray(pixels).save(out, format="PNG")
    assert (decoded(out.getvalue(), height=8, width=8, channels=1) == 255).all()
    assert decoded(out.getvalue(), height=16, width=16, channels=3).mean() > 240


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (as_file(20, 20, "GIF"), "has another format than PNG"),
        (as_file(3, 20), "3 pixels; sides may be"),
        (as_file(20, 20)[:20], "damaged PNG"),
        (as_file(20, 20, "JPEG")[:30], "damaged JPEG"),
        (b"\x89PNG\r\n\x1a\n" + bytes(MAX_PICTURE_BYTES), "32 MiB"),
    ],
)
def test_what_is_no_picture_is_refused_unread(data: bytes, said: str) -> None:
    with pytest.raises(ContractError, match=said):
        check_picture(data)


def test_a_bomb_is_refused_by_its_header() -> None:
    data = bytearray(as_file(20, 20))
    data[16:24] = (60_000).to_bytes(4, "big") * 2
    with pytest.raises(ContractError, match="60000 x 60000 pixels"):
        decoded(bytes(data), height=8, width=8, channels=1)


def test_a_damaged_file_with_a_good_header_is_refused_when_decoded() -> None:
    data = bytearray(as_file(20, 20))
    data[-200:-100] = bytes(100)
    assert check_picture(bytes(data)) == (20, 20)
    with pytest.raises(ContractError, match="damaged image"):
        decoded(bytes(data), height=8, width=8, channels=1)


@pytest.mark.parametrize("kind", ["PNG", "JPEG"])
def test_a_file_that_is_broken_off_is_refused_before_a_run_begins(kind: str) -> None:
    whole = as_file(20, 20, kind)
    for lost in (60, len(whole) // 2):
        with pytest.raises(ContractError, match="damaged image: it is broken off; save it again"):
            check_picture(whole[:-lost])
    check_picture(whole + b"what comes after its end")


def test_the_preview_in_a_photograph_does_not_end_it() -> None:
    whole = as_file(20, 20, "JPEG")
    preview = b"\xff\xe1" + (len(whole) + 2).to_bytes(2, "big") + whole
    photograph = whole[:2] + preview + whole[2:]
    check_picture(photograph)
    with pytest.raises(ContractError, match="broken off"):
        check_picture(photograph[:-100])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "images").mkdir()
    for number in range(2):
        (tmp_path / "images" / f"{number}.png").write_bytes(as_file(10 + number, 10))
    return tmp_path


def jsonl(folder: Path, *images: str | None) -> Path:
    rows = [{"prompt": f"edit {n}", "image": image} for n, image in enumerate(images)]
    (folder / "p.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return folder / "p.jsonl"


def test_json_lines_and_csv_name_images_beside_them(folder: Path) -> None:
    path = jsonl(folder, "images/0.png", "images/1.png")
    (folder / "p.csv").write_text("prompt,image,digit\nedit 0,images/0.png,3\n")
    rows = read_rows(path)
    assert [file for _, file in rows] == [folder / "images/0.png", folder / "images/1.png"]
    [of_csv] = read_prompts(folder / "p.csv")
    assert of_csv.image == rows[0][0].image and dict(of_csv.metadata) == {"digit": "3"}
    assert of_csv.image is not None and of_csv.image.sha256 in source_digests(path)


@pytest.mark.parametrize(
    ("image", "said"),
    [
        ("../secret.png", "line 1: image: .* is no path below the folder"),
        ("/etc/hosts", "line 1: image: .* is no path below the folder"),
        ("images/2.png", "line 1: image: cannot read"),
        ("p.jsonl", "line 1: image: .* has another format than PNG"),
        ("images/0.png\0", "line 1: image: .* is no path below the folder"),
    ],
)
def test_an_image_that_cannot_be_taken_names_its_line(folder: Path, image: str, said: str) -> None:
    with pytest.raises(UserError, match=said):
        read_prompts(jsonl(folder, image))


def test_all_prompts_have_an_image_or_none(folder: Path) -> None:
    with pytest.raises(UserError, match="'edit 1' has none; give all of them one"):
        read_prompts(jsonl(folder, "images/0.png", None))


def test_digests_of_prompts_tell_images_apart(folder: Path) -> None:
    path = jsonl(folder, "images/0.png")
    before = digest(path), record_file("data.prompts", path).digest
    (folder / "images/0.png").write_bytes(as_file(10, 11))
    after = digest(path), record_file("data.prompts", path).digest
    assert before[0] != after[0] and before[1] != after[1]


def test_messages_of_prompts_without_an_image_are_what_they_were(folder: Path) -> None:
    plain = examples.task()
    assert b"image" not in encode(plain)
    [prompt] = read_prompts(jsonl(folder, "images/0.png"))
    edited = plain.model_copy(update={"prompt": prompt})
    assert decode(encode(edited)) == edited
