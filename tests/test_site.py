"""The documents as a site: whole, with pages made from the program, and asking no other host."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.paths import ROOT


@pytest.mark.slow
def test_the_site_is_built_without_a_broken_link_and_loads_nothing_from_elsewhere(
    tmp_path: Path,
) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    built = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    pages = {path.relative_to(tmp_path): path.read_text() for path in tmp_path.rglob("*.html")}
    assert len(pages) > 60
    loaded = re.compile(
        r'<(?:script|img|iframe)[^>]+src="?https?:|<link[^>]+stylesheet[^>]+https?:'
    )
    assert [str(path) for path, text in pages.items() if loaded.search(text)] == []
    made = {path: text for path, text in pages.items() if path.parts[0] == "reference"}
    reference = {path.parts[1]: text for path, text in made.items()}
    assert "digenrl export" in reference["commands"] and "--layout" in reference["commands"]
    assert "/v1/workers/{worker}/drain" in reference["api"]
    assert "batch.group_size" in reference["recipe"]


def test_every_document_is_on_the_site() -> None:
    listed = set(re.findall(r"[\w/.-]+\.md", (ROOT / "mkdocs.yml").read_text()))
    folder = ROOT / "docs"
    there = {str(path.relative_to(folder)) for path in folder.rglob("*.md")}
    assert {path for path in there - listed if not path.startswith("gpu-day/")} == set()
