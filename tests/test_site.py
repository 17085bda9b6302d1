"""The documents as a site: whole, with pages made from the program, and asking no other host."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

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
    keys = next(text for path, text in pages.items() if path.parts[0] == "recipe-keys")
    assert "batch.group_size" in keys and "Number of samples per prompt." in keys
    assert [str(path) for path, text in pages.items() if re.search(r"\] \(<code>", text)] == []


def test_a_link_that_leaves_the_site_becomes_the_file_s_name_without_brackets() -> None:
    """Brackets with a blank between stood on 15 pages, 76 times."""
    spec = importlib.util.spec_from_file_location("hooks", ROOT / "docs" / "site" / "hooks.py")
    assert spec is not None and spec.loader is not None
    hooks = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(hooks)
    page = SimpleNamespace(file=SimpleNamespace(src_uri="recipes.md"))
    shown = hooks.on_page_markdown("a [profile](../services/x/README.md#y), [b](page.md)", page)
    assert shown == "a profile (`services/x/README.md`), [b](page.md)"
    for path in (ROOT / "docs").rglob("*.md"):
        page.file.src_uri = str(path.relative_to(ROOT / "docs"))
        assert "] (`" not in hooks.on_page_markdown(path.read_text(), page), path
    assert "] (`" not in hooks.index()


def test_every_document_is_on_the_site() -> None:
    listed = set(re.findall(r"[\w/.-]+\.md", (ROOT / "mkdocs.yml").read_text()))
    folder = ROOT / "docs"
    there = {str(path.relative_to(folder)) for path in folder.rglob("*.md")}
    assert {path for path in there - listed if not path.startswith("gpu-day/")} == set()
