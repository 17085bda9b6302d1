"""`digenrl fetch` gets prompts from a data set of the hub, with the columns that a recipe names."""

import io
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pyarrow as pa
import pytest
from PIL import Image
from pyarrow import parquet

from digenrl.commands import cli
from digenrl.hub.dataset import fetch_prompts
from shared.errors import UserError
from shared.learning.prompts import read_prompts, read_rows
from shared.recipe.dataset import Dataset
from shared.recipe.recipe import Recipe, load_recipe
from shared.run.layout import file_key
from shared.run.run_recipe import check_recipe, read_recipe
from shared.store import ObjectStore
from shared.store.folder import FolderBackend
from tests.hub.mirror import TOKEN, Mirror, Repository, in_use
from tests.paths import DIGITS
from tests.stored_recipe import store_recipe

NAME = "tiny/edits"
KEY = "data.dataset"


def picture(level: int) -> bytes:
    data = io.BytesIO()
    Image.new("RGB", (8, 8), (level, 0, 0)).save(data, "PNG")
    return data.getvalue()


def table(rows: list[dict[str, Any]]) -> bytes:
    data = io.BytesIO()
    parquet.write_table(pa.Table.from_pylist(rows), data, row_group_size=2)
    return data.getvalue()


def row(number: int) -> dict[str, Any]:
    return {
        "instruction": f"edit {number}", "source": {"bytes": picture(number), "path": None},
        "kind": "slant", "weight": number, "boxes": [1, 2], "seen": b"x",
    }  # fmt: skip


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Mirror]:
    with in_use(tmp_path / "home", monkeypatch) as found:
        rows = [row(1), row(2), {**row(3), "instruction": None}, row(4)]
        found.repositories[f"datasets/{NAME}"] = Repository({
            "data/train-00000-of-00002.parquet": table(rows[:3]),
            "data/train-00001-of-00002.parquet": table(rows[3:]),
            "data/test-00000-of-00001.parquet": table([row(9)]),
        })  # fmt: skip
        yield found


EDITS = Dataset(id=NAME, prompt="instruction", image="source")


def quiet(line: str) -> None:
    pass


def test_columns_become_prompts_metadata_and_source_images(hub: Mirror) -> None:
    said: list[str] = []
    path = fetch_prompts(EDITS, KEY, said.append)
    rows = read_rows(path)
    assert [prompt.text for prompt, _ in rows] == ["edit 1", "edit 2", "edit 4"]
    assert rows[2][0].metadata == {"kind": "slant", "weight": 4, "boxes": [1, 2]}
    assert [file.read_bytes() for _, file in rows if file] == [picture(n) for n in (1, 2, 4)]
    assert any("left out: 1 rows without a prompt" in line for line in said)
    assert any(line.endswith("nor bool: seen") for line in said)
    fetched = hub.fetched()
    assert sorted(fetched) == [f"data/train-0000{n}-of-00002.parquet" for n in (0, 1)]
    assert fetch_prompts(EDITS, KEY, quiet) == path == EDITS.prompts
    assert hub.fetched() == fetched


def test_other_columns_of_the_same_files_are_other_prompts(hub: Mirror) -> None:
    fetch_prompts(EDITS, KEY, quiet)
    fetched = hub.fetched()
    others = Dataset(id=NAME, prompt="instruction", metadata=("kind",))
    assert others.commit is None
    [first, *_] = read_prompts(fetch_prompts(others, KEY, quiet))
    assert (first.image, first.metadata) == (None, {"kind": "slant"})
    assert hub.fetched() == fetched


def test_the_card_says_which_files_are_a_split_s(hub: Mirror) -> None:
    files = [{"split": "train", "path": "data/test-*"}]
    hub.repositories[f"datasets/{NAME}"].card = {
        "configs": [{"config_name": "default", "data_files": files}]
    }
    [only] = read_prompts(fetch_prompts(EDITS, KEY, quiet))
    assert only.text == "edit 9"


def test_rows_of_json_and_csv_name_files_beside_them(hub: Mirror) -> None:
    hub.repositories["datasets/tiny/csv"] = Repository({
        "set/train.csv": b"file_name,text,note\na.png,red,\nb.png,blue,good\n",
        "set/a.png": picture(1), "set/b.png": picture(2), "set/c.png": picture(3),
    })  # fmt: skip
    lines = '{"prompt": "one", "image": "../pics/0.png"}\n\n{"prompt": "two", "image": null}\n'
    hub.repositories["datasets/tiny/json"] = Repository(
        {"rows/all.jsonl": lines.encode(), "pics/0.png": picture(5)}
    )
    of_csv = Dataset(id="tiny/csv", prompt="text", image="file_name")
    prompts = read_prompts(fetch_prompts(of_csv, KEY, quiet))
    told = [(each.text, each.metadata) for each in prompts]
    assert told == [("red", {}), ("blue", {"note": "good"})]
    assert "set/c.png" not in hub.fetched()
    [(only, file)] = read_rows(fetch_prompts(Dataset(id="tiny/json", image="image"), KEY, quiet))
    assert (only.text, file and file.read_bytes()) == ("one", picture(5))


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"prompt": "caption"}, r"prompt: there is no column 'caption'; it has instruction, sour"),
        ({"image": "picture"}, r"image: there is no column 'picture'; it has instruction, source"),
        ({"image": "weight"}, r"image: the column 'weight' holds int, neither an image nor its p"),
        ({"image": "kind"}, r"image: tiny/edits has no file 'slant', which data/train-00000-of-0"),
        ({"metadata": ("seen",)}, r"metadata: the column 'seen' holds bytes, no text, number or"),
        ({"metadata": ("box",)}, r"metadata: there is no column 'box'; it has instruction, source"),
        ({"prompt": "weight"}, r"prompt: the column 'weight' holds int, not text .*; name another"),
        ({"split": "dev"}, r"split: no file belongs to 'dev'; its files are data/test-00000"),
        ({"config": "hard"}, r"config: there is no 'hard'; its folders are data \(tiny/edits\)"),
        ({"revision": "v2"}, r"revision: tiny/edits has no revision 'v2'; see "),
        ({"id": "tiny/none"}, r"id: there is no tiny/none at http.* or set HF_TOKEN if it is pri"),
    ],
)
def test_what_is_not_there_is_one_line_with_field_and_remedy(
    hub: Mirror, changes: dict[str, Any], fault: str
) -> None:
    wanted = EDITS.model_copy(update=changes)
    with pytest.raises(UserError, match=rf"^data\.dataset\.{fault}"):
        fetch_prompts(wanted, KEY, quiet)
    assert wanted.commit is None


def test_a_library_that_is_missing_is_named_with_its_remedy(
    hub: Mirror, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(UserError, match=r'^data\.dataset\.id: .*parquet needs the extra "data"'):
        fetch_prompts(EDITS, KEY, quiet)


def recipe_of(folder: Path, *lines: str) -> Path:
    path = folder / "recipe.toml"
    path.write_text("\n".join((f'base = "{DIGITS}"', *lines)))
    return path


def fetched(hub: Mirror, path: Path, *options: str) -> Recipe:
    with (
        mock.patch.object(sys, "argv", ["digenrl", "fetch", str(path), *options]),
        pytest.raises(SystemExit),
    ):
        cli.main()
    return load_recipe(path)


def test_a_recipe_names_data_sets_in_place_of_prompts(
    hub: Mirror, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = recipe_of(
        tmp_path, "[data.dataset]", f'id = "{NAME}"', 'prompt = "instruction"',
        "[evaluation.dataset]", f'id = "{NAME}"', 'prompt = "instruction"', 'split = "test"',
    )  # fmt: skip
    with pytest.raises(UserError, match=f"{NAME} is not on this host .* digenrl fetch RECIPE"):
        read_prompts(load_recipe(path).data.prompts)
    recipe = fetched(hub, path)
    held_out = recipe.evaluation.prompts
    assert held_out is not None
    assert capsys.readouterr().out.split() == [str(recipe.data.prompts), str(held_out)]
    assert [each.text for each in read_prompts(held_out)] == ["edit 9"]
    assert recipe.data.dataset is not None
    assert recipe.data.dataset.revision == hub.repositories[f"datasets/{NAME}"].commit


def test_prompts_have_one_name(hub: Mirror, tmp_path: Path) -> None:
    both = recipe_of(tmp_path, "[data]", 'prompts = "p.txt"', "[data.dataset]", f'id = "{NAME}"')
    with pytest.raises(UserError, match=r"^data\.prompts, data\.dataset: set one of the two"):
        load_recipe(both)
    by_option = load_recipe(recipe_of(tmp_path), {"data.dataset.id": NAME}).data
    assert by_option.dataset is not None
    assert by_option.prompts == by_option.dataset.prompts
    of_file = recipe_of(tmp_path, "[data.dataset]", f'id = "{NAME}"')
    assert load_recipe(of_file, {"data.prompts": "/p.txt"}).data.dataset is None


async def test_a_run_keeps_the_commit_and_digest_of_its_prompts(
    hub: Mirror, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = recipe_of(tmp_path, "[data.dataset]", f'id = "{NAME}"', 'prompt = "instruction"')
    recipe, store = fetched(hub, path), ObjectStore(FolderBackend(tmp_path / "store"))
    await store_recipe(store, recipe)
    assert await store.read(file_key(recipe.run.name, "data.prompts")) is not None
    repository = hub.repositories[f"datasets/{NAME}"]
    begun = repository.commit
    repository.files["data/train-00001-of-00002.parquet"] = table([row(5)])
    assert repository.commit != begun
    with pytest.raises(UserError, match=r"^data\.prompts: .* has the digest"):
        await check_recipe(store, fetched(hub, path))
    # Another host keeps them elsewhere.
    (tmp_path / "home").rename(tmp_path / "elsewhere")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "elsewhere"))
    there = await read_recipe(store, recipe.run.name)
    assert there is not None
    assert len(read_prompts(there.data.prompts)) == 3
    assert json.loads(there.model_dump_json())["data"]["dataset"]["revision"] == begun


def test_a_gated_data_set_says_what_to_do(hub: Mirror, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.repositories[f"datasets/{NAME}"].gated = True
    with pytest.raises(UserError, match=r"^data\.dataset\.id: tiny/edits is gated: .*/datasets/"):
        fetch_prompts(EDITS, KEY, quiet)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert len(read_prompts(fetch_prompts(EDITS, KEY, quiet))) == 3
