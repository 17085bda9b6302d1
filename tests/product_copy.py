"""A copy of the product to which a test adds something, as CONTRIBUTING says."""

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from tests.paths import ROOT

Edits = Mapping[str, tuple[tuple[str, str], ...]]
"""File -> pairs of a text of the file and its replacement; without a text before, a new file."""
ROOMS = ("digenrl", "services", "shared")
MAX_FILES = 2
"""Files of the product that an addition may change."""


def copy_product(folder: Path, *additions: Edits) -> None:
    """Copy the product to a folder and make these additions."""
    for room in ROOMS:  # with what is compiled, but for files under way
        shutil.copytree(ROOT / room, folder / room, ignore=shutil.ignore_patterns("*.pyc.*"))
    for edits in additions:
        assert len(edits) <= MAX_FILES
        for name, changes in edits.items():
            file = folder / name
            text = file.read_text() if changes[0][0] else ""
            for before, after in changes:
                assert not before or text.count(before) == 1, f"{name} has changed: {before!r}"
                text = text.replace(before, after, 1)
            file.write_text(text)


def run_in_copy(folder: Path, program: str) -> list[str]:
    """Run a program with the product in a folder; return the lines that it prints."""
    paths = os.pathsep.join((str(folder), str(ROOT)))
    ended = subprocess.run(
        [sys.executable, "-c", program], cwd=folder, env={**os.environ, "PYTHONPATH": paths},
        text=True, capture_output=True, check=False,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    return ended.stdout.splitlines()
