"""`digenrl up` typed again: the run goes on, is kept under a name that every command takes, or the
command says what to type."""

import json
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from digenrl.local.checking.preflight import LocalRun, UpRequest, prepare
from digenrl.local.runs import RunProgress, find_run
from shared.errors import UserError
from shared.release import RELEASE
from tests.paths import DIGITS

TYPED = ("digenrl", "up", "my recipe.toml", "--fresh", "--detach")


class Typed:
    """Types `digenrl up` for the recipe of the digits, and keeps what was said."""

    def __init__(self, runs: Path) -> None:
        self.runs = runs
        self.said: list[str] = []

    def __call__(
        self, *, run: str = "", resume: bool = False, fresh: bool = False, **keys: Any
    ) -> LocalRun:
        self.said = []
        options: Mapping[str, Any] = {key.replace("__", "."): each for key, each in keys.items()}
        request = UpRequest(
            DIGITS, options, resume=resume, port=0, runs=self.runs, run=run, fresh=fresh,
            typed=TYPED, say=self.said.append,
        )  # fmt: skip
        local = prepare(request)
        local.lock.close()
        self.said = [line for line in self.said if "implies" not in line]
        return local


@pytest.fixture
def up(tmp_path: Path) -> Typed:
    return Typed(tmp_path / "runs")


def test_an_unfinished_run_of_the_same_recipe_goes_on_and_the_first_line_says_so(up: Typed) -> None:
    first = up()
    folder, secret = first.folder, first.keys.secret("trainer")
    assert up.said == []
    RunProgress("running", 6, 60, 0.5).write(folder)
    again = up()
    assert again.resumed and again.folder == folder
    assert again.keys.secret("trainer") == secret
    assert up.said == [
        "run digits is not finished (interrupted at step 6 of 60), and goes on; --fresh begins "
        "another"
    ]
    assert again.again == "digenrl up 'my recipe.toml' --resume"
    assert up(run__steps=99, rollout__workers=3).resumed, "keys that a resumed run may change"
    assert up(resume=True).resumed and up.said == []


def test_an_unfinished_run_of_another_recipe_is_left_alone_and_both_commands_are_named(
    up: Typed,
) -> None:
    folder = up().folder
    RunProgress("stopped", 6, 60, 0.5).write(folder)
    before = sorted(path.name for path in up.runs.iterdir())
    with pytest.raises(UserError) as refused:
        up(run__seed=7)
    said = str(refused.value)
    assert said.startswith("run.name: digits is not finished (stopped at step 6 of 60)")
    assert "run.seed: " in said and "\n" not in said
    resume, fresh = (shlex.split(each) for each in said.split("`")[1::2])
    assert fresh == ["digenrl", "up", "my recipe.toml", "--fresh"] and "digits.1" in said
    assert resume == [
        "digenrl", "up", f"{folder}/recipe.json", "--run", str(folder), "--resume",
    ]  # fmt: skip
    assert sorted(path.name for path in up.runs.iterdir()) == before
    own = UpRequest(Path(resume[2]), {}, resume=True, port=0, runs=up.runs, run=resume[4])
    local = prepare(own)
    local.lock.close()
    assert local.resumed and local.folder == folder
    assert not up(run__seed=7, fresh=True).resumed
    assert (up.runs / "digits.1" / "state.json").exists()


def test_a_run_that_has_trained_nothing_is_kept_and_the_repaired_recipe_starts(up: Typed) -> None:
    RunProgress("failed", 0, 60).write(up().folder)
    with pytest.raises(UserError, match=r"run\.seed"):
        up(run__seed=7, resume=True)
    assert not up(run__seed=7).resumed
    assert up.said == ["run digits: the earlier one (failed at step 0 of 60) is kept as digits.1"]


def test_a_run_of_a_release_that_cannot_be_resumed_names_fresh_alone(up: Typed) -> None:
    folder = up().folder
    recipe = json.loads((folder / "recipe.json").read_text())
    recipe["run"]["of_tomorrow"] = 1
    (folder / "recipe.json").write_text(json.dumps(recipe))
    for resume in (False, True):
        with pytest.raises(UserError, match="is not a recipe of this release") as refused:
            up(resume=resume)
        assert str(refused.value).split("`")[1::2] == ["digenrl up 'my recipe.toml' --fresh"]
    assert not up(fresh=True).resumed
    assert find_run("digits.1", up.runs).id == "digits"


def test_a_run_of_another_release_is_refused_in_a_line_that_names_both(up: Typed) -> None:
    started = up().folder / "started.json"
    record = json.loads(started.read_text())
    record["versions"]["digenrl"] = "0.1.0"
    started.write_text(json.dumps(record))
    for resume in (False, True):
        with pytest.raises(UserError, match=rf"of release 0.1.0, .* of {RELEASE}.* --fresh"):
            up(resume=resume)
    assert not up(fresh=True).resumed


def test_a_finished_run_is_kept_under_a_name_that_goes_on_as_well(up: Typed) -> None:
    folder = up().folder
    RunProgress("finished", 60, 60, 0.5).write(folder)
    (folder / "summary.json").write_text("earlier")
    assert not up(run__seed=7).resumed
    assert up.said == [
        "run digits: the earlier one (finished at step 60 of 60) is kept as digits.1"
    ]
    assert (up.runs / "digits.1" / "summary.json").read_text() == "earlier"
    kept = up(run="digits.1", resume=True, run__steps=90)
    assert (kept.folder, kept.recipe.run.name) == (up.runs / "digits.1", "digits")
    RunProgress("finished", 90, 90, 0.5).write(up.runs / "digits.1")
    RunProgress("finished", 60, 60, 0.5).write(folder)
    up()
    assert up.said[0].endswith("kept as digits.2")


def test_a_run_whose_report_is_not_made_is_not_finished(up: Typed) -> None:
    folder = up().folder
    view = {"phase": "finished", "step": 60, "steps": 60, "reward_mean": 0.5, "failure": None}
    RunProgress.from_view(view).write(folder)
    assert up().resumed


def test_a_renamed_folder_goes_on_under_its_new_name(up: Typed) -> None:
    up(run="cc").folder.rename(up.runs / "mine")
    local = up(run="mine")
    assert local.resumed and (local.folder.name, local.recipe.run.name) == ("mine", "cc")
    with pytest.raises(UserError, match=r"run\.name: use 1 to 64 letters"):
        up(run="a.new.one")
