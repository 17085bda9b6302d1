"""Dockerfiles and shell scripts pass the linters of their languages."""

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.paths import ROOT

pytestmark = pytest.mark.deploy
DOCKERFILES = sorted(
    path for folder in ("deploy", "tests/deploy") for path in (ROOT / folder).rglob("*Dockerfile")
)
SCRIPTS = sorted(
    path
    for path in (ROOT / "deploy").rglob("*")
    if path.is_file() and path.read_bytes().startswith((b"#!/bin/sh", b"#!/bin/bash"))
)


def lint(*words: str | Path) -> None:
    ended = subprocess.run(words, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_dockerfile_passes_hadolint(path: Path, tool: Callable[[str], Path]) -> None:
    unpinned = ("--ignore", "DL3008") if "tests" in path.parts else ()  # Debian's newest
    lint(tool("hadolint"), *unpinned, path)


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_script_passes_shellcheck(path: Path, tool: Callable[[str], Path]) -> None:
    lint(tool("shellcheck"), path)
