"""Docs, docstrings, messages, help and templates are written in plain English."""

import json
import subprocess

import pytest

from tests.paths import ROOT
from tests.prose import Text, findings, texts

SENTENCES = json.loads((ROOT / "tests/vectors/prose.json").read_text())
"""Sentences that needed a translation, and how a technical editor would print them."""

EXCEPT = ("docs/history/", "CHANGELOG.md", "docs/recipe-keys.md", "bench/", "tests/")
"""History, generated pages, and files outside of the product."""


LISTED = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True)
FILES = [
    name
    for name in LISTED.stdout.splitlines()
    if name.endswith((".md", ".py", ".html"))
    and (ROOT / name).exists()
    and not name.startswith(EXCEPT)
]


def test_the_rules_find_sentences_that_need_a_translation_and_no_plain_ones() -> None:
    found = [each["now"] for each in SENTENCES if findings(Text(0, each["now"]))]
    assert len(SENTENCES) >= 40
    assert len(found) >= 30
    assert [each["better"] for each in SENTENCES if findings(Text(0, each["better"]))] == []


@pytest.mark.parametrize("name", FILES)
def test_a_file_is_written_in_plain_english(name: str) -> None:
    found = [
        f"{name}:{text.line}: {each}" for text in texts(ROOT / name) for each in findings(text)
    ]
    assert found == []
