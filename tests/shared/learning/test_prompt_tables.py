"""Prompts from Parquet files and saved datasets."""

import hashlib
import json
import re
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from shared.errors import UserError
from shared.learning.prompts import digest, read_prompts

COLUMNS: dict[str, Any] = {
    "prompt": ["a three", "a seven", "a zero"],
    "digit": [3, 7, None],
    "weight": [0.5, 1.0, 2.0],
    "hard": [True, False, True],
    "style": pa.array(["ink", "chalk", "ink"]).dictionary_encode(),
}
READ = [
    ("a three", {"digit": 3, "weight": 0.5, "hard": True, "style": "ink"}),
    ("a seven", {"digit": 7, "weight": 1.0, "hard": False, "style": "chalk"}),
    ("a zero", {"weight": 2.0, "hard": True, "style": "ink"}),
]


def parquet(tmp_path: Path, columns: dict[str, Any]) -> Path:
    path = tmp_path / "prompts.parquet"
    pq.write_table(pa.table(columns), path, row_group_size=2)
    return path


def saved(folder: Path, *tables: pa.Table) -> Path:
    """A folder as `datasets` leaves it: a stream for each shard, named in an order of its own."""
    folder.mkdir(parents=True)
    names = [f"data-{9 - number:05d}-of-{len(tables):05d}.arrow" for number in range(len(tables))]
    for name, table in zip(names, tables, strict=True):
        with pa.OSFile(str(folder / name), "wb") as sink, pa.ipc.new_stream(
            sink, table.schema
        ) as writer:  # fmt: skip
            writer.write_table(table, max_chunksize=2)
    files = [{"filename": name} for name in names]
    (folder / "state.json").write_text(json.dumps({"_data_files": files, "_split": None}))
    return folder


def read(path: Path) -> list[tuple[str, dict[str, Any]]]:
    return [(prompt.text, dict(prompt.metadata)) for prompt in read_prompts(path)]


def test_all_columns_of_a_parquet_file_but_the_prompt_are_metadata(tmp_path: Path) -> None:
    path = parquet(tmp_path, COLUMNS)
    assert read(path) == READ
    assert digest(path) == hashlib.sha256(path.read_bytes()).hexdigest()


def test_what_is_no_number_is_left_out_as_what_is_null(tmp_path: Path) -> None:
    path = parquet(tmp_path, {"prompt": ["a", "b"], "weight": [float("nan"), 0.5]})
    assert read(path) == [("a", {}), ("b", {"weight": 0.5})]


def test_a_column_of_images_themselves_is_refused_with_the_remedy(tmp_path: Path) -> None:
    path = parquet(tmp_path, {"prompt": ["a"], "image": [{"bytes": b"x", "path": None}]})
    with pytest.raises(
        UserError, match=r"row 1: image: .* is no path .* data.dataset.folder also reads"
    ):
        read(path)


def test_a_saved_dataset_is_read_in_the_order_of_its_files(tmp_path: Path) -> None:
    table = pa.table(COLUMNS)
    folder = saved(tmp_path / "prompts", table.slice(0, 1), table.slice(1))
    assert read(folder) == READ
    [first, last] = sorted(folder.glob("*.arrow"), reverse=True)
    assert digest(folder) == hashlib.sha256(first.read_bytes() + last.read_bytes()).hexdigest()


def test_what_json_lines_become_as_a_table_is_what_they_are(tmp_path: Path) -> None:
    lines = [
        {"prompt": "a three", "metadata": {"digit": 3}},
        {"prompt": "a fox", "metadata": {"text": "fox", "digit": 1}},
        {"prompt": "nothing", "metadata": None},
    ]
    path = tmp_path / "prompts.parquet"
    pq.write_table(pa.Table.from_pylist(lines), path)
    assert read(path) == [
        ("a three", {"digit": 3}), ("a fox", {"digit": 1, "text": "fox"}), ("nothing", {}),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("columns", "said"),
    [
        ({"caption": ["a"], "n": [1]}, 'has no column "prompt", but caption, n; rename the column'),
        ({"prompt": [1, 2]}, "row 1: prompt: Input should be a valid string"),
        ({"prompt": pa.array([None, ""], pa.string())}, "holds no prompt"),
        ({"prompt": ["a", "b" * 5000]}, "row 2: prompt: String should have at most 4096"),
        (
            {"prompt": ["a"], "tags": [[b"x"]]},
            "row 1: metadata.tags: input was not a valid JSON value",
        ),
        (
            {"prompt": ["a"], "metadata": [{"box": [b"x"]}]},
            "row 1: metadata.box: input was not a valid JSON value",
        ),
        ({"prompt": ["a"], **{f"c{n}": [n] for n in range(33)}}, "row 1: metadata: Dictionary"),
        ({"prompt": pa.array([], pa.string())}, "holds no prompt"),
    ],
)
def test_a_table_of_anything_else_is_refused_in_one_line(
    tmp_path: Path, columns: dict[str, Any], said: str
) -> None:
    path = parquet(tmp_path, columns)
    with pytest.raises(UserError) as refused:
        read_prompts(path)
    message = str(refused.value)
    assert message.startswith(f"data.prompts: {path}")
    assert said in message and "\n" not in message


def test_a_row_is_counted_within_its_own_file(tmp_path: Path) -> None:
    faulty = pa.table({"prompt": ["a", "b" * 5000]})
    folder = saved(tmp_path / "prompts", pa.table({"prompt": ["x", "y", "z"]}), faulty)
    with pytest.raises(UserError, match=re.escape("data-00008-of-00002.arrow row 2: prompt")):
        read_prompts(folder)


def test_several_splits_are_named_and_so_are_other_folders(tmp_path: Path) -> None:
    table = pa.table({"prompt": ["a"]})
    for split in ("train", "test"):
        saved(tmp_path / "all" / split, table)
    (tmp_path / "all" / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    (tmp_path / "other").mkdir()
    with pytest.raises(UserError, match="holds the splits test, train; name one"):
        read_prompts(tmp_path / "all")
    assert read(tmp_path / "all" / "train") == [("a", {})]
    with pytest.raises(
        UserError, match=r"other is not a dataset made by save_to_disk .*; name such"
    ):
        read_prompts(tmp_path / "other")


@pytest.mark.parametrize("name", ["gone.parquet", "text.parquet", "text.arrow", "text.jsonl"])
def test_a_file_that_is_none_is_named(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    if path.stem == "text":
        path.write_bytes(b"PAR\xff a line of text\nand another")
    with pytest.raises(UserError) as refused:
        read_prompts(path)
    assert str(refused.value).startswith("data.prompts: ")
    assert str(path) in str(refused.value) and "\n" not in str(refused.value)


def test_without_pyarrow_the_extra_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = parquet(tmp_path, {"prompt": ["a"]})
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(
        UserError,
        match=re.escape(
            'run make install, or .venv/bin/uv pip install -c constraints.txt -e ".[data]"'
        ),
    ):
        read_prompts(path)
