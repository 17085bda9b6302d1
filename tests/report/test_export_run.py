"""Which version is exported, and what is said where it cannot be."""

import asyncio
from pathlib import Path
from typing import get_args

import pytest
from typer.testing import CliRunner

from digenrl.cli import app
from digenrl.commands.export import _version
from digenrl.evaluation.best import ranked_versions
from digenrl.report.export_run import Wanted, export_run, kept_in_words
from digenrl.report.layouts import Layout
from shared.errors import UserError
from shared.run.run_recipe import needed_recipe
from tests.follow.runs import RUN, Run
from tests.view.stored import stored_run


def exported(run: Run, version: Wanted, monkeypatch: pytest.MonkeyPatch, out: Path) -> None:
    monkeypatch.setenv("DIGENRL_STORE_URL", run.settings.store_url)
    asyncio.run(export_run(RUN, out, Layout.diffusers, version))


def test_the_best_version_is_that_of_the_best_evaluation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = stored_run(tmp_path, timelines=False)
    recipe = asyncio.run(needed_recipe(run.store, RUN))
    ranked = asyncio.run(ranked_versions(run.store, recipe))
    assert ranked == [0, 4], "equal gold: the older one"
    with pytest.raises(UserError, match=r"weights of version 0 are not kept .*run\.keep_every"):
        exported(run, "best", monkeypatch, tmp_path / "out")
    assert kept_in_words([3, 4], ranked).endswith(
        "of these `--version 4` has the best evaluation; "
    )
    assert kept_in_words([3], ranked) == "those of 3 are; " and kept_in_words([], ranked) == ""
    young = Run(tmp_path / "young").begin()
    with pytest.raises(UserError, match=r"no version of test is evaluated.*`digenrl evaluate test"):
        exported(young, "best", monkeypatch, tmp_path / "out")
    with pytest.raises(UserError, match="there is no version 9; the newest is 0"):
        exported(young, 9, monkeypatch, tmp_path / "out")


def test_a_version_is_named_by_number_or_by_word() -> None:
    words = get_args(get_args(Wanted)[1])
    assert [_version(each) for each in ("12", *words)] == [12, *words]
    with pytest.raises(UserError, match="--version: 'last' is none of best, newest and a number"):
        CliRunner().invoke(app, ["export", RUN, "--version", "last"], catch_exceptions=False)
