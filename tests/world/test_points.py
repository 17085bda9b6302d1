"""Worlds kill processes at every named point of the product, which the documentation has."""

import re

from tests.paths import ROOT
from tests.world.rare_faults import POINTS


def test_worlds_and_the_documentation_have_every_point_that_services_name() -> None:
    files = (ROOT / "services").rglob("*.py")
    named = {p for file in files for p in re.findall(r'\breach\("([^"]+)"\)', file.read_text())}
    text = (ROOT / "docs" / "reliability.md").read_text()
    table = text.split("## The points of a commit")[1].split("\n## ")[0]
    rows = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    documented = re.findall(r"`([^`]+)`", " ".join(rows))
    assert sorted(documented) == sorted(POINTS) == sorted(named)
