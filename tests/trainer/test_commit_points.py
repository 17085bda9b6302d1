"""The named points of a commit, at which tests kill a process, are those of the documentation."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCUMENTED = ("trainer.", "commit.", "scheduler.", "reward.")


def points() -> list[str]:
    """Points that services name, but for those of fluid devices, which have tests of their own."""
    files = (ROOT / "services").rglob("*.py")
    found = {p for file in files for p in re.findall(r'\breach\("([^"]+)"\)', file.read_text())}
    return sorted(point for point in found if point.startswith(DOCUMENTED))


def test_the_points_of_a_commit_are_those_that_the_documentation_names() -> None:
    text = (ROOT / "docs" / "reliability.md").read_text()
    table = text.split("## The points of a commit")[1].split("\n## ")[0]
    rows = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    assert sorted(re.findall(r"`([^`]+)`", " ".join(rows))) == points()
