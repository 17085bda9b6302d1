"""Every step of a run is written once, whatever becomes of the process that writes it."""

import asyncio
import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from typer.testing import CliRunner

from digenrl.api.feed import Position
from digenrl.commands.cli import app
from digenrl.evaluation.records import Evaluations, KeptSample
from digenrl.follow.panels import shown_samples
from digenrl.follow.steps import MetricTargets, check_installed, follow
from shared.errors import UserError
from shared.run.layout import commit_key
from shared.run.log import Log
from tests import examples
from tests.follow.runs import RUN, Run, metrics_of
from tests.run_log import feed_of
from tests.view.stored import stored_run

WAIT_S = 60.0


def write(run: Run, folder: Path) -> None:
    asyncio.run(follow(run.settings, MetricTargets(tensorboard=folder), once=True))


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path / "objects").begin()


def curves(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """Reads the steps of the only run in the folder, as TensorBoard does."""
    [of_run] = folder.iterdir()
    read = EventAccumulator(str(of_run), size_guidance={"scalars": 0}).Reload()
    return {
        tag: [(event.step, event.value) for event in read.Scalars(tag)]
        for tag in read.Tags()["scalars"]
    }


def wanted(*steps: int) -> Mapping[str, list[tuple[int, float]]]:
    return {tag: [(step, metrics_of(step)[tag]) for step in steps] for tag in metrics_of(0)}


def test_each_step_is_written_once_however_often_it_is_started(run: Run, tmp_path: Path) -> None:
    run.commit(3)
    write(run, tmp_path / "tb")
    assert curves(tmp_path / "tb") == wanted(1, 2, 3)
    run.commit(2)
    write(run, tmp_path / "tb")
    write(run, tmp_path / "tb")
    assert curves(tmp_path / "tb") == wanted(1, 2, 3, 4, 5)


def test_steps_are_lines_that_say_what_the_events_say(run: Run) -> None:
    run.commit(2)
    command = ["follow", RUN, "--json", "--once"]
    said = CliRunner().invoke(app, command, env=run.environment, catch_exceptions=False)
    found = [json.loads(line) for line in said.stdout.splitlines()]
    told = asyncio.run(feed_of(run.store, RUN).after(Position(commits=1)))
    assert found == [{"event": fact.name, "data": fact.fields} for _, fact in told[:2]]
    assert [each["data"]["version"] for each in found] == [1, 2]


def panels(folder: Path) -> list[tuple[int, int, int]]:
    """Reads step, height and width of what was shown of evaluations, as TensorBoard does."""
    [of_run] = folder.iterdir()
    read = EventAccumulator(str(of_run), size_guidance={"images": 0}).Reload()
    return [
        (event.step, event.height, event.width)
        for tag in read.Tags()["images"]
        for event in read.Images(tag)
    ]


def test_an_evaluation_is_one_panel_once_beside_its_step(tmp_path: Path) -> None:
    run = stored_run(tmp_path)  # with evaluations of versions 0 and 4, six samples each
    write(run, tmp_path / "tb")
    assert panels(tmp_path / "tb") == []
    asyncio.run(Evaluations(run.store, RUN, "a" * 64).announce(Log.of_evaluations(run.store, RUN)))
    for _ in range(2):
        write(run, tmp_path / "tb")
    assert panels(tmp_path / "tb") == [(0, 64, 96), (4, 64, 96)]
    assert curves(tmp_path / "tb") == wanted(1, 2, 3, 4)


def test_a_panel_has_few_samples_of_many_prompts() -> None:
    still = examples.ref("still")
    samples = [
        KeptSample(prompt=f"{number % 20}", media=still, still=still) for number in range(400)
    ]
    assert [each.prompt for each in shown_samples(samples)] == [str(n) for n in range(16)]
    few = [each.model_copy(update={"prompt": "1"}) for each in samples[:3]]
    assert len(shown_samples([*few, samples[0]])) == 4


def test_a_step_that_was_cut_off_while_it_was_written_is_written_anew(
    run: Run, tmp_path: Path
) -> None:
    run.commit(3)
    write(run, tmp_path / "tb")
    [path] = (tmp_path / "tb").glob("*/events*")
    path.write_bytes(path.read_bytes()[:-10])
    assert curves(tmp_path / "tb") == wanted(1, 2)
    write(run, tmp_path / "tb")
    assert curves(tmp_path / "tb") == wanted(1, 2, 3)


def test_a_run_that_is_started_anew_under_its_name_has_a_curve_of_its_own(tmp_path: Path) -> None:
    for trainer in ("trainer-0-a", "trainer-0-b"):
        run = Run(tmp_path / trainer, trainer).begin()
        run.commit(2)
        write(run, tmp_path / "tb")
    folders = list((tmp_path / "tb").iterdir())
    assert len(folders) == 2
    assert all(re.fullmatch(rf"{RUN}-[0-9a-f]{{8}}", folder.name) for folder in folders)


def test_a_process_that_was_there_first_writes_steps_as_they_come_and_ends_when_told(
    tmp_path: Path,
) -> None:
    run, folder = Run(tmp_path / "objects"), tmp_path / "tb"
    process = subprocess.Popen(
        [sys.executable, "-m", "digenrl", "follow", "--run", RUN, "--tensorboard", str(folder)],
        env=run.environment,
    )
    try:
        run.begin().commit(1)
        deadline = time.monotonic() + WAIT_S
        while not folder.exists() or curves(folder) != wanted(1):
            assert time.monotonic() < deadline and process.poll() is None
            time.sleep(0.1)
        run.commit(1)
        process.send_signal(signal.SIGTERM)
        assert process.wait(WAIT_S) == 0
    finally:
        process.kill()
    assert curves(folder) == wanted(1, 2), "what was committed before it was told to end"


def test_without_a_run_or_a_place_to_write_to_it_says_so(tmp_path: Path) -> None:
    run = Run(tmp_path / "objects")
    with pytest.raises(UserError, match="--run: the store holds no run 'test'"):
        write(run, tmp_path / "tb")
    with pytest.raises(UserError, match="--tensorboard, --wandb: name a folder"):
        asyncio.run(follow(run.settings, MetricTargets()))
    assert not (tmp_path / "tb").exists()


@pytest.mark.parametrize("extra", ["tensorboard", "wandb"])
def test_an_extra_that_is_not_installed_is_named(
    extra: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == extra]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delitem(sys.modules, f"digenrl.follow.{extra}", raising=False)
    monkeypatch.setitem(sys.modules, extra, None)
    targets = MetricTargets(tmp_path) if extra == "tensorboard" else MetricTargets(wandb="project")
    with pytest.raises(UserError, match=re.escape(f'--{extra} needs the extra "{extra}"; ')):
        check_installed(targets)


@pytest.mark.slow
def test_records_that_are_none_end_it(run: Run, tmp_path: Path) -> None:
    asyncio.run(run.store.write(commit_key(RUN, 1), b"{}"))
    ended = subprocess.run(
        [
            sys.executable, "-m", "digenrl", "follow", "--run", RUN, "--once",
            "--tensorboard", str(tmp_path / "tb"),
        ],
        env=run.environment,
        capture_output=True, text=True, timeout=WAIT_S,
    )  # fmt: skip
    assert ended.returncode == 1
    assert "00000001.json is not a commit record" in ended.stderr
