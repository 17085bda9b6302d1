"""Prompts from files."""

import json
from pathlib import Path

import pytest

from shared.errors import UserError
from shared.learning.prompts import read_prompts


def file(tmp_path: Path, name: str, text: str) -> Path:
    path = tmp_path / name
    path.write_text(text)
    return path


def test_a_text_file_has_a_prompt_on_each_line(tmp_path: Path) -> None:
    path = file(tmp_path, "prompts.txt", 'a fox\n\n  a sign that says "hi"  \n')
    assert [prompt.text for prompt in read_prompts(path)] == ["a fox", 'a sign that says "hi"']
    assert all(prompt.metadata == {} for prompt in read_prompts(path))


def test_json_lines_have_metadata(tmp_path: Path) -> None:
    path = file(tmp_path, "p.jsonl", '{"prompt": "a", "metadata": {"digit": 3}}\n{"prompt": "b"}')
    assert [dict(prompt.metadata) for prompt in read_prompts(path)] == [{"digit": 3}, {}]


def test_what_is_null_is_left_out_and_lines_without_metadata_have_their_other_keys(
    tmp_path: Path,
) -> None:
    lines = [
        '{"prompt": "a", "metadata": {"digit": 3, "note": null}, "other": 1}',
        '{"prompt": "b", "digit": 3, "note": null, "box": [1, 2], "kind": "red", "x": NaN}',
    ]
    prompts = read_prompts(file(tmp_path, "p.jsonl", "\n".join(lines)))
    assert read_prompts(file(tmp_path, "p.json", f"[{','.join(lines)}]")) == prompts
    assert [dict(prompt.metadata) for prompt in prompts] == [
        {"digit": 3}, {"digit": 3, "kind": "red", "box": [1, 2]},
    ]  # fmt: skip


@pytest.mark.parametrize("encoding", ["latin-1", "utf-16"])
def test_a_text_of_another_encoding_is_to_be_saved_anew(tmp_path: Path, encoding: str) -> None:
    path = tmp_path / "p.csv"
    path.write_text("prompt\ncafé", encoding=encoding)
    with pytest.raises(UserError, match=r"no text in UTF-8 .*; save it as UTF-8"):
        read_prompts(path)


def test_columns_of_a_csv_file_but_the_prompt_are_metadata(tmp_path: Path) -> None:
    text = '\ufeffprompt,digit,note\r\n"a sign, ""hi""\nbelow",3,\r\n\r\na fox,,red\r\n'
    prompts = read_prompts(file(tmp_path, "p.csv", text))
    assert [(prompt.text, dict(prompt.metadata)) for prompt in prompts] == [
        ('a sign, "hi"\nbelow', {"digit": "3"}),
        ("a fox", {"note": "red"}),
    ]


def test_lines_end_only_where_an_editor_ends_them(tmp_path: Path) -> None:
    texts = ["a fox\u2028below", "a\x85b", "a\x0bb\x0cc\x1cd"]
    plain = file(tmp_path, "p.txt", "\n".join(texts))
    assert [prompt.text for prompt in read_prompts(plain)] == texts
    rows = [json.dumps({"prompt": text}, ensure_ascii=False) for text in texts[:2]]
    lines = tmp_path / "p.jsonl"
    lines.write_bytes("\r\n".join(rows).encode())
    assert [prompt.text for prompt in read_prompts(lines)] == texts[:2]


def test_a_column_without_a_name_is_left_out_and_suffixes_may_be_capitals(tmp_path: Path) -> None:
    [prompt] = read_prompts(file(tmp_path, "P.CSV", ",prompt,digit,,\n0,a fox,3,,\n"))
    assert (prompt.text, prompt.metadata) == ("a fox", {"digit": "3"})
    [prompt] = read_prompts(file(tmp_path, "P.TXT", "a fox"))
    assert prompt.text == "a fox"


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("p.csv", "prompt,a,a\nx,1,2", 'two columns "a"; rename one'),
        ("p.jsonl", "[" * 100_000, "line 1 is no JSON object"),
        ("p.list", "a fox", "line 1 is no JSON object: .* end the file's name in .txt"),
        ("p.csv", "text,digit\na,1", 'no column "prompt", but text, digit'),
        ("p.csv", "prompt\na fox, red", "line 2 has more cells than the first line has names"),
        ("p.csv", 'prompt\n"a fox', "after line 1: unexpected end of data; close every double"),
        ("p.csv", "prompt;digit\na;1", "separate cells with commas, not ';'"),
        (
            "p.jsonl",
            '{"text": "a"}',
            "line 1 has no column .prompt., but text; .* data.dataset.folder",
        ),
        ("p.csv", "prompt,digit\n,3", "holds no prompt"),
        ("p.jsonl", '{"prompt": 3}', "line 1: prompt: "),
        ("p.jsonl", '{"prompt": "a"}\na fox', "line 2 is no JSON object"),
        ("p.txt", "\n \n", "holds no prompt"),
        ("p.txt", "a" * 100_000, "line 1: "),
    ],
)
def test_a_file_of_anything_else_is_refused(
    tmp_path: Path, name: str, text: str, said: str
) -> None:
    with pytest.raises(UserError, match=said):
        read_prompts(file(tmp_path, name, text))
