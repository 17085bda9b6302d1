"""Which files of a repository of the hub hold a split."""

from pathlib import Path
from typing import Any

import pytest

from shared.errors import UserError
from shared.learning.hub_datasets import chosen_files, missing_dataset_advice

SHARDS = [f"data/{split}-0000{n}-of-00002.parquet" for split in ("test", "train") for n in (0, 1)]


@pytest.mark.parametrize(
    ("names", "split", "expected"),
    [
        ([*SHARDS, "README.md"], "train", SHARDS[2:]),
        (SHARDS, "test", SHARDS[:2]),
        (["prompts.csv", "images/0.png"], "train", ["prompts.csv"]),
        (["dev.jsonl", "train.jsonl"], "validation", ["dev.jsonl"]),
        (["train.csv", "train.parquet"], "train", ["train.parquet"]),
        (["constraints.csv", "dataset_infos.json"], "train", ["constraints.csv"]),
        (["hard/test.json", "easy/test.json"], "test", ["easy/test.json", "hard/test.json"]),
    ],
)
def test_without_a_card_a_split_has_the_files_that_bear_its_name(
    names: list[str], split: str, expected: list[str]
) -> None:
    assert chosen_files(names, (), None, split) == expected


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ([{"split": "train", "path": "data/train-*"}], SHARDS[2:]),
        ([{"split": "train", "path": ["data/train-00000*", "nothing/*"]}], SHARDS[2:3]),
        ({"train": "**/t??t-*"}, SHARDS[:2]),
        ("data/test*", SHARDS[:2]),
        (None, SHARDS[2:]),
    ],
)
def test_a_card_names_the_files(files: Any, expected: list[str]) -> None:
    configs = [
        {"config_name": "other", "data_files": "x.csv"},
        {"config_name": "mine", "default": True, "data_files": files},
    ]
    assert chosen_files(SHARDS, configs, None, "train") == expected
    assert chosen_files(SHARDS, configs, "mine", "train") == expected


def test_a_configuration_without_a_card_is_a_folder() -> None:
    """As on the branch of files that the hub has converted."""
    names = ["edits/train/0000.parquet", "plain/train/0000.parquet"]
    assert chosen_files(names, (), "edits", "train") == names[:1]


@pytest.mark.parametrize(
    ("names", "configs", "config", "split", "fault"),
    [
        (["a.tar"], [], None, "train", "^id: has no Parquet, JSON or CSV .* refs/convert/parquet"),
        (SHARDS, [], None, "dev", "^split: no file belongs to 'dev'; its files are data/test"),
        (SHARDS, [], "easy", "train", "^config: there is no 'easy'; its folders are data"),
        (SHARDS, [{"config_name": "a"}], "b", "train", "^config: there is no 'b'; it has a"),
        (SHARDS, [{"config_name": "a"}, {"config_name": "b"}], None, "train", "^config: is needed"),
    ],
)
def test_what_is_not_there_is_said_with_what_is(
    names: list[str], configs: list[dict[str, Any]], config: str | None, split: str, fault: str
) -> None:
    with pytest.raises(UserError, match=fault):
        chosen_files(names, configs, config, split)


def test_only_prompts_of_the_hub_are_to_be_fetched(tmp_path: Path) -> None:
    absent = tmp_path / "datasets--me--pics" / "prompts" / "main" / "prompts.jsonl"
    fault = missing_dataset_advice(absent) or ""
    assert "me/pics is not on this host" in fault
    assert "digenrl fetch RECIPE" in fault
    assert missing_dataset_advice(tmp_path / "prompts.jsonl") is None
