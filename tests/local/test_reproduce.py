"""A run from its record is the same, or the first step that differs is named, and why."""

import json
import shutil
from pathlib import Path

import pytest

from digenrl.local import reproduce
from digenrl.local.checking.preflight import UpRequest, prepare
from digenrl.local.reproduce import (
    RunRecord,
    StoredFacts,
    differences,
    first_difference,
    read_record,
    verdict,
    workers_differences,
)
from digenrl.local.runs import Run, find_run
from digenrl.local.start import STARTED_JSON
from shared.errors import UserError
from tests.paths import DIGITS

VERSIONS = {"torch of rollout": "2.10.0"}


@pytest.fixture
def recorded(tmp_path: Path) -> Path:
    local = prepare(UpRequest(DIGITS, {}, resume=False, port=0, runs=tmp_path))
    local.lock.close()
    return local.folder


def recorded_at(folder: Path) -> RunRecord:
    return read_record(find_run(str(folder), folder.parent))


def again(folder: Path, **options: object) -> Path:
    """Record the run once more, with keys changed."""
    keys = {name.replace("__", "."): value for name, value in options.items()}
    request = UpRequest(
        folder / "recipe.json", {"run.name": "again", **keys}, resume=False, port=0,
        runs=folder.parent, fresh=True,
    )  # fmt: skip
    local = prepare(request)
    local.lock.close()
    return local.folder


def test_another_name_and_nothing_else_is_no_difference(recorded: Path) -> None:
    assert differences(recorded_at(recorded), recorded_at(again(recorded))) == []


def test_each_planted_difference_is_named(recorded: Path, tmp_path: Path) -> None:
    other = again(recorded, run__seed=7, algorithm__kl_beta=0.5, reward__scorers__proxy__weight=2)
    started = json.loads((other / STARTED_JSON).read_text())
    started["versions"]["diffusers"] = "0.1"
    (other / STARTED_JSON).write_text(json.dumps(started))
    named = differences(recorded_at(recorded), recorded_at(other))
    assert [line.split(" was ")[0] for line in named] == [
        "run.seed", "algorithm.kl_beta", "reward.scorers.proxy.weight", "version of diffusers",
    ]  # fmt: skip
    assert named[0] == "run.seed was 0, and is 7"


def test_prompts_that_have_moved_are_the_same_and_changed_ones_are_named(
    recorded: Path, tmp_path: Path
) -> None:
    moved = tmp_path / "prompts.jsonl"
    shutil.copy(recorded_at(recorded).recipe.data.prompts, moved)
    same = again(recorded, data__prompts=str(moved))
    assert differences(recorded_at(recorded), recorded_at(same)) == []
    moved.write_text('{"prompt": "another", "metadata": {"digit": 3}}\n')
    named = differences(
        recorded_at(recorded), recorded_at(again(recorded, data__prompts=str(moved)))
    )
    assert any(line.startswith("digest of data.prompts was ") for line in named)


def test_the_first_version_that_differs_is_named_with_the_reason(
    recorded: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = again(recorded, run__seed=1)
    digests = {recorded.name: ["a", "b", "c"], other.name: ["a", "b", "x"]}
    monkeypatch.setattr(
        reproduce, "stored", lambda record: StoredFacts(digests[record.run.folder.name], VERSIONS)
    )
    same, lines = verdict(recorded_at(recorded), recorded_at(other))
    assert not same
    assert "first differs" in lines[0] and "at step 2 (version 2 of 3)" in lines[0]
    assert lines[1:] == ["because run.seed was 0, and is 1"]
    _, lines = verdict(recorded_at(recorded), recorded_at(again(recorded)))
    assert lines[1].startswith("because trainer.deterministic is false")


def test_versions_of_workers_on_other_hosts_are_compared(
    recorded: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = again(recorded)
    theirs = {**VERSIONS, "torch of rollout": "2.9.0, 2.10.0"}
    found = {
        recorded.name: StoredFacts(["a", "b"], VERSIONS),
        other.name: StoredFacts(["a", "x"], theirs),
    }
    monkeypatch.setattr(reproduce, "stored", lambda record: found[record.run.folder.name])
    _, lines = verdict(recorded_at(recorded), recorded_at(other))
    assert lines[1:] == [
        'because version of torch of rollout workers was "2.10.0", and is "2.9.0, 2.10.0"'
    ]
    assert workers_differences(StoredFacts([], {}), found[other.name]) == []


def test_a_run_of_more_steps_has_the_same_versions() -> None:
    assert first_difference(["a", "b"], ["a", "b", "c"]) is None
    assert first_difference(["a"], ["b"]) == 0


def test_a_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"holds no run of `digenrl up`"):
        read_record(Run("none", "none", tmp_path))
