"""Files of prompts as people have them: encodings, empty prompts, GenEval's own metadata."""

import json
import runpy
from pathlib import Path
from typing import Any

import pytest

from digenrl.hub.dataset import convert_files
from services.reward.object_checks import parse_requirements
from services.reward.scorer import scorer_inputs
from shared.errors import UserError
from shared.learning.prompts import num_empty, read_prompts
from shared.messages.codec import decode, encode
from shared.recipe.dataset import Dataset
from shared.recipe.recipe import load_recipe
from tests import examples
from tests.paths import RECIPES

GENEVAL: dict[str, Any] = {
    "tag": "position",
    "include": [
        {"class": "clock", "count": 2, "color": "red"},
        {"class": "cat", "count": 1, "position": ["left of", 0]},
    ],
    "exclude": [{"class": "clock", "count": 3}],
    "prompt": "a photo of two red clocks right of a cat",
}
TEXTS = ["a cat", "", "  ", "a dog"]


def table(path: Path, rows: list[dict[str, Any]]) -> Path:
    """Write rows in the format that the name says."""
    match path.suffix:
        case ".txt":
            path.write_text("\n".join(str(row["prompt"]) for row in rows))
        case ".csv":
            lines = [",".join(rows[0]), *(",".join(map(str, row.values())) for row in rows)]
            path.write_text("\n".join(lines))
        case ".parquet":
            pa, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
            parquet.write_table(pa.Table.from_pylist(rows), path)
        case _:
            path.write_text("\n".join(map(json.dumps, rows)))
    return path


def from_folder(path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, list[str]]:
    """Read a file as `data.dataset.folder`, as rows of a hub's data set are."""
    monkeypatch.setenv("DIGENRL_MODELS", str(path.parent / "models"))
    said: list[str] = []
    return convert_files(Dataset(folder=path), path, "data.dataset", said.append), said


@pytest.mark.parametrize("suffix", [".txt", ".jsonl", ".csv", ".parquet"])
def test_a_row_without_a_prompt_is_left_out_of_every_format(
    suffix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [{"prompt": text, "n": number} for number, text in enumerate(TEXTS)]
    path = table(tmp_path / f"p{suffix}", rows)
    assert [prompt.text for prompt in read_prompts(path)] == ["a cat", "a dog"]
    if suffix != ".txt":  # whose blank lines are no rows
        assert num_empty(path) == 2
        made, said = from_folder(path, monkeypatch)
        assert [prompt.text for prompt in read_prompts(made)] == ["a cat", "a dog"]
        assert any("left out: 2 rows without a prompt" in line for line in said)
    with pytest.raises(UserError, match="holds no prompt"):
        read_prompts(table(tmp_path / f"none{suffix}", [{"prompt": " ", "n": 1}]))


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_a_prompt_that_is_null_is_none(suffix: str, tmp_path: Path) -> None:
    path = table(tmp_path / f"p{suffix}", [{"prompt": "a"}, {"prompt": None}])
    assert [prompt.text for prompt in read_prompts(path)] == ["a"]


@pytest.mark.parametrize(
    ("name", "data", "said"),
    [
        ("a.txt", "a cat\nit\u2019s a café\n".encode("cp1252"), "line 2, byte 3: 0x92"),
        ("b.txt", "a cat\r\n".encode("utf-16"), "line 1, byte 1: 0xff"),
        ("c.csv", "prompt\na\ncafé\n".encode("cp1252"), "line 3, byte 4: 0xe9"),
        ("d.jsonl", '{"prompt": "café"}\n'.encode("latin-1"), "line 1, byte 16: 0xe9"),
        ("e.txt", b"\xef\xbb\xbfa\ncaf\xe9", "line 2, byte 4: 0xe9"),
        ("f.csv", b"prompt\n" + b"x\n" * 99_999 + b"caf\xe9\n", "line 100001, byte 4: 0xe9"),
    ],
)
def test_a_file_in_another_encoding_is_named_with_line_and_byte(
    name: str, data: bytes, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / name
    path.write_bytes(data)
    with pytest.raises(UserError, match=said) as raised:
        read_prompts(path)
    assert "no text in UTF-8" in str(raised.value)
    if path.suffix != ".txt":
        with pytest.raises(UserError, match=said):
            from_folder(path, monkeypatch)


def test_so_is_a_recipe(tmp_path: Path) -> None:
    path = tmp_path / "r.toml"
    path.write_bytes(b'[run]\nname = "caf\xe9"\n')
    with pytest.raises(UserError, match=r"no text in UTF-8 .line 2, byte 12: 0xe9"):
        load_recipe(path)


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
@pytest.mark.parametrize("nested", [False, True])
def test_geneval_s_own_file_reaches_the_scorer_as_it_is(
    suffix: str, nested: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    facts: dict[str, Any] = {key: GENEVAL[key] for key in GENEVAL if key != "prompt"}
    if suffix == ".parquet":  # has no lists of texts and numbers; what a row lacks is null
        facts["include"] = [GENEVAL["include"][0], {"class": "cat", "count": 1}]
    row = {"prompt": GENEVAL["prompt"], **({"metadata": facts} if nested else facts)}
    path = table(tmp_path / f"evaluation_metadata{suffix}", [row])
    for file in (path, from_folder(path, monkeypatch)[0]):
        [prompt] = read_prompts(file)
        assert prompt.metadata == facts
        wanted = parse_requirements(scorer_inputs(prompt))
        assert [(each.name, each.count) for each in wanted.include] == [("clock", 2), ("cat", 1)]
        assert wanted.include[1].position == (None if suffix == ".parquet" else ("left of", 0))
        assert [each.count for each in wanted.exclude] == [3]
        sent = examples.task(prompt=prompt)
        assert decode(encode(sent)) == sent


@pytest.mark.parametrize(
    ("metadata", "said"),
    [
        ({"boxes": [["x" * 1000] * 20]}, r"20\d+ bytes are too many; at most 16384"),
        ({"ids": [[2**63]]}, "ids has more than 64 bits"),
        ({"deep": json.loads("[" * 40 + "]" * 40)}, "deep has more than 32 lists or tables"),
        ({f"k{number}": number for number in range(33)}, "at most 32"),
    ],
)
@pytest.mark.parametrize("nested", [False, True])
def test_metadata_that_no_message_takes_is_refused_with_its_line(
    metadata: dict[str, Any], nested: bool, said: str, tmp_path: Path
) -> None:
    given = {"metadata": metadata} if nested else metadata
    path = table(tmp_path / "p.jsonl", [{"prompt": "a"}, {"prompt": "b", **given}])
    with pytest.raises(UserError, match=rf"line 2: metadata: .*{said}"):
        read_prompts(path)


def test_the_geneval_recipe_trains_on_prompts_in_geneval_s_format(tmp_path: Path) -> None:
    runpy.run_path(str(RECIPES / "prompts" / "geneval.py"))["write"](tmp_path)
    recipe = load_recipe(RECIPES / "published" / "flow-grpo.sd35-geneval.toml")
    texts = []
    for path in (recipe.data.prompts, recipe.evaluation.prompts):
        assert path is not None and path.read_bytes() == (tmp_path / path.name).read_bytes()
        prompts = read_prompts(path)
        assert {prompt.metadata["tag"] for prompt in prompts} == {
            "single_object", "two_object", "counting", "colors", "position", "color_attr",
        }  # fmt: skip
        assert all(parse_requirements(scorer_inputs(prompt)).include for prompt in prompts)
        texts.append({prompt.text for prompt in prompts})
    assert not texts[0] & texts[1]


@pytest.mark.parametrize("suffix", [".jsonl", ".csv", ".parquet"])
def test_a_negative_prompt_is_no_metadata(
    suffix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [{"prompt": "a cat", "negative_prompt": "blurry", "n": 3}]
    path = table(tmp_path / f"p{suffix}", rows)
    for file in (path, from_folder(path, monkeypatch)[0]):
        [prompt] = read_prompts(file)
        assert prompt.negative_prompt == "blurry" and prompt.metadata.keys() == {"n"}
        sent = examples.task(prompt=prompt)
        assert decode(encode(sent)) == sent
