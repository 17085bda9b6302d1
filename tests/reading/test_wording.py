"""Texts of other people on the command line and on the page."""

import pytest

from digenrl.commands.tables import table
from digenrl.view.markup import templates

HOSTILE = "a cat\nFAKE 2026 [error] all is lost \u202egnp.exe \x1b[31mred"


def test_a_prompt_forges_no_row_of_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    table(("sample", "prompt"), [("0/1", HOSTILE)])
    assert capsys.readouterr().out.splitlines() == [
        "sample  prompt",
        r"0/1     a cat\nFAKE 2026 [error] all is lost <U+202E>gnp.exe <U+001B>[31mred",
    ]


def test_a_prompt_does_not_turn_the_page_around() -> None:
    shown = templates().from_string("<p>{{ prompt }}</p>").render(prompt=HOSTILE)
    assert "\u202e" not in shown and "&lt;U+202E&gt;gnp.exe" in shown
