"""Prompts from a user's own files, with the columns that a recipe names."""

import os
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from digenrl.commands import cli
from digenrl.hub.dataset import fetch_prompts, make_own_prompts
from digenrl.local.checking.preflight import ignore
from shared.errors import UserError
from shared.learning.prompts import read_prompts, read_rows
from shared.recipe.dataset import Dataset
from shared.recipe.recipe import load_recipe
from shared.run.run_recipe import check_same_run
from tests.hub.test_dataset import KEY, picture, recipe_of, row, table
from tests.paths import DIGITS


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DIGENRL_MODELS", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def mine(tmp_path: Path) -> Path:
    """A folder with two splits, and images beside the rows."""
    folder = tmp_path / "mine"
    (folder / "pics").mkdir(parents=True)
    (folder / "train.csv").write_text("text,file\nred,pics/1.png\nblue,pics/2.png\n,pics/1.png\n")
    (folder / "test.jsonl").write_text('{"text": "green", "file": "pics/2.png"}\n')
    for level in (1, 2):
        (folder / "pics" / f"{level}.png").write_bytes(picture(level))
    return folder


def made(source: Path, **keys: Any) -> list[tuple[str, bytes | None]]:
    dataset = Dataset(folder=source, **keys)
    rows = read_rows(fetch_prompts(dataset, KEY, ignore))
    return [(prompt.text, None if file is None else file.read_bytes()) for prompt, file in rows]


def test_a_folder_s_rows_become_prompts_with_their_images(mine: Path) -> None:
    said: list[str] = []
    fetch_prompts(Dataset(folder=mine, prompt="text", image="file"), KEY, said.append)
    assert said[0] == f"{mine}: 2 prompts" and "left out: 1 rows without a prompt" in said[1]
    named = {"prompt": "text", "image": "file"}
    assert made(mine, **named) == [("red", picture(1)), ("blue", picture(2))]
    assert made(mine, split="test", **named) == [("green", picture(2))]
    [(prompt, _)] = read_rows(
        fetch_prompts(Dataset(folder=mine / "test.jsonl", prompt="text"), KEY, ignore)
    )
    assert (prompt.text, prompt.metadata) == ("green", {"file": "pics/2.png"})


def test_files_of_each_format_may_hold_the_images_themselves(tmp_path: Path) -> None:
    (tmp_path / "rows.parquet").write_bytes(table([row(3), row(4)]))
    found = made(tmp_path / "rows.parquet", prompt="instruction", image="source")
    assert found == [("edit 3", picture(3)), ("edit 4", picture(4))]


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"prompt": "caption"}, r"prompt: there is no column 'caption'; it has text, file"),
        ({"image": "text"}, r"image: train.csv names 'red', which cannot be read \(No such file"),
        ({"split": "dev"}, r"split: no file belongs to 'dev'; its files are test.jsonl, train.csv"),
        ({"config": "hard"}, r"config: there is no 'hard'; its folders are none"),
        ({"folder": "none"}, r"folder: there is no .*none; name a folder, or a file"),
        ({"folder": "pics"}, r"folder: .*pics has no file named .parquet, .* goes into data.prom"),
        ({"folder": "pics/1.png"}, r"folder: .*1.png has another format; use .parquet, .jsonl"),
        (
            {"folder": "broken.json"},
            r"folder: broken.json line 1 is no JSON object: .*; correct the file",
        ),
        (
            {"folder": "out.csv", "image": "file"},
            r"image: out.csv names '../x', which is not below",
        ),
        ({"folder": "semi.csv"}, r"prompt: .* it has text;file, and separate cells with commas"),
        (
            {"folder": "more.csv"},
            r"folder: more.csv line 2 has more cells .* in double quotes; correct",
        ),
        ({"folder": "latin.csv"}, r"folder: latin.csv cannot be read: it is no text in UTF-8"),
        ({"revision": "0" * 40}, r"revision: the prompts of .*mine have the digest \w+ now, not"),
    ],
)
def test_what_cannot_be_made_is_one_line_with_field_and_remedy(
    mine: Path, changes: dict[str, Any], fault: str
) -> None:
    wrong = {
        "broken.json": "hello", "semi.csv": "text;file\na;b\n", "more.csv": "text,file\na, b,c\n",
        "latin.csv": "text,file\ncafé,b\n",
    }  # fmt: skip
    for name, text in wrong.items():
        (mine / name).write_text(text, encoding="latin-1")
    (mine / "out.csv").write_text("text,file\nred,../x\n")
    folder = mine / changes.pop("folder", "")
    if folder == mine:
        for name in wrong:
            (mine / name).unlink()
        (mine / "out.csv").unlink()
    with pytest.raises(UserError, match=rf"^data\.dataset\.{fault}"):
        made(folder, **{"prompt": "text", **changes})


def test_a_recipe_names_files_relative_to_itself_and_their_prompts_are_made_once(
    mine: Path, cache: Path
) -> None:
    path = recipe_of(
        mine.parent, "[data.dataset]", 'folder = "mine"', 'prompt = "text"',
        "[evaluation.dataset]", 'folder = "mine"', 'prompt = "text"', 'split = "test"',
        "[[reward.scorers]]", 'name = "size"', 'type = "jpeg-compressibility"',
    )  # fmt: skip
    recipe = load_recipe(path)
    with pytest.raises(UserError, match=r"data\.dataset\.folder.* make them with: digenrl fetch"):
        read_prompts(recipe.data.prompts)
    words = ["check", str(path), "--evaluation.digits", "none"]
    said = CliRunner().invoke(cli.app, words, catch_exceptions=False)
    assert said.exit_code == 0 and f"{mine}: 2 prompts" in said.output
    begun = load_recipe(path)
    assert [each.text for each in read_prompts(begun.data.prompts)] == ["red", "blue"]
    assert begun.evaluation.prompts is not None
    assert [each.text for each in read_prompts(begun.evaluation.prompts)] == ["green"]
    assert not make_own_prompts(begun, ignore), "nothing is left to make"

    # What the run has recorded names the digest, and is read without the user's files.
    resolved = mine.parent / "recipe.json"
    resolved.write_text(begun.model_dump_json())
    (mine.parent / "moved").mkdir()
    mine.rename(mine.parent / "moved" / "mine")
    assert load_recipe(resolved) == begun
    there = {f"{table}.dataset.folder": "moved/mine" for table in ("data", "evaluation")}
    there |= {f"{table}.dataset.prompt": "text" for table in ("data", "evaluation")}
    there["evaluation.dataset.split"] = "test"
    assert make_own_prompts(load_recipe(path, there), ignore)
    moved = load_recipe(path, there)
    assert moved.data.prompts == begun.data.prompts
    check_same_run(begun, moved)


def test_files_that_have_changed_are_made_anew_and_are_another_run(mine: Path) -> None:
    path = recipe_of(mine.parent, "[data.dataset]", 'folder = "mine"', 'prompt = "text"')
    make_own_prompts(load_recipe(path), ignore)
    begun = load_recipe(path)
    with (mine / "train.csv").open("a") as rows:
        rows.write("grey,pics/1.png\n")
    os.utime(mine / "train.csv", ns=(1, 1))
    assert load_recipe(path).data.dataset == begun.data.dataset.model_copy(  # type: ignore[union-attr]
        update={"revision": None}
    )
    assert make_own_prompts(load_recipe(path), ignore)
    again = load_recipe(path)
    assert [each.text for each in read_prompts(again.data.prompts)] == ["red", "blue", "grey"]
    with pytest.raises(UserError, match=r"^data\.prompts: the run 'digits' was started with"):
        check_same_run(begun, again)


def test_a_data_set_is_of_the_hub_or_of_this_host(mine: Path) -> None:
    both = recipe_of(mine.parent, "[data.dataset]", 'folder = "mine"', 'id = "org/name"')
    with pytest.raises(UserError, match=r"data\.dataset.*give id, .* or folder, files of th"):
        load_recipe(both)
    of_hub = recipe_of(mine.parent, "[data.dataset]", 'id = "org/name"', 'revision = "v1"')
    chosen = load_recipe(of_hub, {"data.dataset.folder": str(mine)}).data.dataset
    assert chosen is not None and (chosen.id, chosen.revision) == (None, None)
    assert load_recipe(DIGITS).data.dataset is None
