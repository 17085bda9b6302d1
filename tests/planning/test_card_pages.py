"""The pages for a card state what `digenrl check` forecasts for it."""

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from digenrl.commands.cli import app
from tests.paths import RECIPES, ROOT

pytestmark = pytest.mark.slow
ROW = re.compile(r"^\| `(\S+)` \| `(--\S+ \S+)` \| (\d+) \| (\d+) \|$", flags=re.MULTILINE)
PAGES = ("card-24gb", "cards-8x80gb", "cards-mixed")
ROWS = [
    row for page in PAGES for row in ROW.findall((ROOT / "docs" / f"{page}.md").read_text())
]  # fmt: skip


def test_each_page_has_rows() -> None:
    assert len(ROWS) > 30
    assert all(Path(RECIPES / f"{recipe}.toml").exists() for recipe, *_ in ROWS)


@pytest.mark.parametrize(("recipe", "devices", "seconds", "gib"), ROWS)
def test_a_forecast_is_the_one_of_check(recipe: str, devices: str, seconds: str, gib: str) -> None:
    words = ["check", str(RECIPES / f"{recipe}.toml"), "--elsewhere", *devices.split()]
    output = CliRunner().invoke(app, words, catch_exceptions=False).output
    assert re.search(rf": {seconds} s per step, {gib} of \d+ GiB$", output.strip())
