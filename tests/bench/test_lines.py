"""The table of lines in docs/far-apart.md."""

import pytest

from bench.lines import DEVICES, NAMES, PAGE, SITE, read, simulated, table
from bench.tables import with_table
from tests.paths import ROOT

DRIFT = 0.02
"""Share by which a figure may have moved since it was written."""


def test_the_page_has_the_stored_figures() -> None:
    page = (ROOT / PAGE).read_text()
    assert with_table(page, "lines", table(read())) == page, "python -m bench lines"


def test_the_page_types_the_command_of_the_table() -> None:
    command = f"digenrl plan recipes/flux1-dev.toml --devices {DEVICES}"
    assert f"{command} --site {SITE.format(mbits=100)}\n" in (ROOT / PAGE).read_text()


def test_a_site_never_slows_a_step() -> None:
    for figures in read().values():
        assert max(figures.values()) <= 1.02 * figures["without"]


def test_a_line_is_enough_if_it_brings_most_of_what_a_fast_one_does() -> None:
    figures = {"1000": 50.0, "300": 60.0, "100": 61.0, "30": 99.0, "10": 100.0}
    [*_, row] = table({"qwen-image": {**figures, "without": 100.0}}).splitlines()
    assert row == "| Qwen-Image | 100 | 50 | 60 | 61 | 99 | 100 | 300 Mbit/s |"


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_the_stored_figures_are_those_of_today(name: str) -> None:
    assert simulated(name) == pytest.approx(read()[name], rel=DRIFT), "python -m bench lines"
