"""Rows of files that somebody else has made, as prompts."""

import json
from pathlib import Path

import pytest

from shared.errors import UserError
from shared.learning.dataset_rows import Columns, ConversionCounts, make_prompts
from shared.learning.hub_datasets import PROMPTS_FILE
from shared.learning.prompts import read_prompts
from shared.limits import MAX_TEXT

PLAIN = Columns()


def made(folder: Path, name: str, data: bytes, columns: Columns = PLAIN) -> ConversionCounts:
    file = folder / name
    file.write_bytes(data)
    return make_prompts([(file, lambda path: b"")], columns, folder / "made", "data.dataset")


def texts(folder: Path) -> list[str]:
    return [prompt.text for prompt in read_prompts(folder / "made" / PROMPTS_FILE)]


def lines(*rows: object) -> bytes:
    return "\n".join(map(json.dumps, rows)).encode()


def test_what_was_made_can_be_read_whatever_a_prompt_holds(tmp_path: Path) -> None:
    written = ["a\u2028b", "a\x85b", 'a "b"\nc\r\nd', "手書きの五 🙂"]
    found = made(tmp_path, "rows.jsonl", lines(*({"prompt": text} for text in written)))
    assert (found.prompts, texts(tmp_path)) == (4, written)


def test_rows_of_json_need_not_have_every_column(tmp_path: Path) -> None:
    rows = lines({"note": 1}, {"prompt": "a"}, {"prompt": "b", "kind": "slant"})
    found = made(tmp_path, "rows.jsonl", rows, Columns(metadata=("kind",)))
    assert (found.prompts, found.empty_rows, texts(tmp_path)) == (2, 1, ["a", "b"])


def test_an_object_of_metadata_stands_for_its_fields(tmp_path: Path) -> None:
    rows = lines({"prompt": "a", "metadata": {"digit": 3, "prompt": "b"}, "kind": "slant"})
    made(tmp_path, "rows.jsonl", rows)
    [prompt] = read_prompts(tmp_path / "made" / PROMPTS_FILE)
    assert (prompt.text, prompt.metadata) == ("a", {"digit": 3, "kind": "slant"})


def test_a_list_may_begin_after_spaces(tmp_path: Path) -> None:
    made(tmp_path, "rows.json", b'\n  [{"prompt": "a"}]')
    assert texts(tmp_path) == ["a"]


def test_a_prompt_that_is_too_long_is_left_out_and_counted(tmp_path: Path) -> None:
    rows = lines({"prompt": "a" * (MAX_TEXT + 1)}, {"prompt": "b"})
    found = made(tmp_path, "rows.jsonl", rows)
    assert (found.prompts, found.long_rows, texts(tmp_path)) == (1, 1, ["b"])


@pytest.mark.parametrize(
    ("name", "data", "fault"),
    [
        (
            "rows.csv",
            "prompt\ncaf\xe9".encode("latin-1"),
            "id: rows.csv cannot be read: it is no text in UTF-8",
        ),
        (
            "rows.csv",
            b'prompt\n"' + b"a" * 200_000,
            "id: rows.csv cannot be read after line 1: field larger",
        ),
        ("rows.csv", b"", "prompt: there is no column 'prompt'"),
        ("rows.parquet", b"hello", "id: rows.parquet cannot be read: Parquet file size"),
        ("rows.jsonl", b"caf\xe9", "id: rows.jsonl cannot be read: it is no text in UTF-8"),
        ("rows.jsonl", b"[" * 100_000, "id: rows.jsonl line 1 is no JSON object"),
        ("rows.json", b'{"data": [{"prompt": "a"}]}', "prompt: .* 'prompt'; it has data"),
    ],
)
def test_a_file_that_cannot_be_read_is_one_line(
    tmp_path: Path, name: str, data: bytes, fault: str
) -> None:
    with pytest.raises(UserError, match=rf"^data\.dataset\.{fault}"):
        made(tmp_path, name, data)
