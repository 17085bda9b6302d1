"""Which version is exported, and what is said where it cannot be."""

import asyncio
from pathlib import Path
from typing import Any, get_args

import pytest
from typer.testing import CliRunner

from digenrl.commands.cli import app
from digenrl.commands.export import parse_version
from digenrl.evaluation.best import comparison_name, ranked_versions
from digenrl.evaluation.records import Quality
from digenrl.report.export_run import WantedVersion, export_run, kept_in_words
from digenrl.report.layouts import Layout
from shared.errors import UserError
from shared.run.evaluations import worth_of
from shared.run.run_recipe import needed_recipe
from tests.follow.runs import RUN, Run
from tests.view.stored import stored_run


def exported(run: Run, version: WantedVersion, monkeypatch: pytest.MonkeyPatch, out: Path) -> None:
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
        exported(run, 0, monkeypatch, tmp_path / "out")
    better = stored_run(tmp_path / "better", timelines=False, gold=0.1)
    with pytest.raises(UserError, match="weights of version 4 are not kept"):
        exported(better, "best", monkeypatch, tmp_path / "out")
    assert kept_in_words([3, 4], ranked).endswith(
        "of these `--version 4` has the best evaluation; "
    )
    assert kept_in_words([3], ranked) == "stored versions: 3; " and kept_in_words([], ranked) == ""
    young = Run(tmp_path / "young").begin()
    with pytest.raises(UserError, match=r"no version of test is evaluated.*`digenrl evaluate test"):
        exported(young, "best", monkeypatch, tmp_path / "out")
    with pytest.raises(UserError, match="there is no version 9; the newest is 0"):
        exported(young, 9, monkeypatch, tmp_path / "out")


def test_the_model_before_training_is_not_exported_as_the_best(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = stored_run(tmp_path, timelines=False)
    said = (
        r"better than 0, the model before training \(gold reward other 0\.500\).*--version newest"
    )
    with pytest.raises(UserError, match=said):
        exported(run, "best", monkeypatch, tmp_path / "out")


@pytest.mark.parametrize(
    ("quality", "weights", "figure", "measure"),
    [
        ({}, {}, 0.3, "training reward"),
        ({"gold_accuracy": 0.9}, {}, 0.9, "gold accuracy, held-out network"),
        ({"gold_accuracy": 0.9, "gold": {"a": 0.5}}, {}, 0.5, "gold reward a"),
        ({"gold": {"a": 0.5, "b": 0.2}}, {"b": 2.0}, 0.9, "gold reward 1 x a + 2 x b"),
    ],
)
def test_what_versions_are_compared_by_has_its_name(
    quality: dict[str, Any], weights: dict[str, float], figure: float, measure: str
) -> None:
    measured = Quality(reward=0.3, num_samples=1, **quality)
    assert worth_of(measured, weights) == pytest.approx(figure)
    assert comparison_name(measured, weights) == measure


def test_a_version_is_named_by_number_or_by_word() -> None:
    words = get_args(get_args(WantedVersion)[1])
    assert [parse_version(each) for each in ("12", *words)] == [12, *words]
    with pytest.raises(
        UserError, match="--version: 'last' is not a version; use best, newest or a number"
    ):
        CliRunner().invoke(app, ["export", RUN, "--version", "last"], catch_exceptions=False)
