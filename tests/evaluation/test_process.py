"""The evaluator as a process: probes, metrics, and what SIGKILL leaves behind."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from digenrl.local.processes.ports import free_ports
from shared.store import ObjectStore
from tests.evaluation.runs import begin, commit_up_to

PATIENCE_S = 120.0
DUE = [0, 2, 4, 5]

Start = Callable[..., "Process"]


class Process:
    def __init__(self, objects: Path, log: Path, *arguments: str) -> None:
        [self.port] = free_ports(1)
        with log.open("ab") as output:
            self.process = subprocess.Popen(
                [
                    sys.executable, "-m", "digenrl", "evaluate", "--run", "digits",
                    "--port", str(self.port), *arguments,
                ],
                env={
                    **os.environ,
                    "DIGENRL_STORE_URL": f"file://{objects}",
                    "DIGENRL_OPEN_API": "1",
                },
                stdout=output, stderr=output,
            )  # fmt: skip

    def get(self, path: str) -> httpx.Response:
        return httpx.get(f"http://127.0.0.1:{self.port}{path}", timeout=10)

    def progress(self) -> dict[str, Any]:
        try:
            found: dict[str, Any] = self.get("/v1/evaluation").json()
        except httpx.HTTPError:
            return {"pending": None}
        return found


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    started: list[Process] = []

    def begin_process(*arguments: str) -> Process:
        started.append(Process(tmp_path / "objects", tmp_path / "log", *arguments))
        return started[-1]

    yield begin_process
    for each in started:
        each.process.kill()
        each.process.wait()


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def records(tmp_path: Path) -> dict[int, str]:
    """The text of each record, by its version."""
    found = (tmp_path / "objects" / "digits" / "evaluations").glob("*/records/*.json")
    return {int(path.stem): path.read_text() for path in found if not path.name.startswith(".")}


@pytest.mark.slow
async def test_a_killed_evaluator_goes_on_and_two_of_them_do_no_harm(
    folder_store: ObjectStore, tmp_path: Path, start: Start
) -> None:
    recipe = await begin(folder_store)
    await commit_up_to(folder_store, recipe, 3)
    killed = start("--worker", "killed")
    wait_for(lambda: 0 in records(tmp_path))
    killed.process.kill()
    killed.process.wait()
    before = records(tmp_path)

    both = [
        start("--stay", "--worker", "one"),
        start("--stay", "--worker", "other", "--nice", "19"),
    ]
    wait_for(lambda: all(each.progress()["pending"] == [4, 5] for each in both))
    assert all(each.get("/readyz").status_code == 200 for each in both), "it waits for commits"
    await commit_up_to(folder_store, recipe, 5)
    wait_for(lambda: all(each.progress()["pending"] == [] for each in both))

    after = records(tmp_path)
    assert sorted(after) == DUE
    assert {version: after[version] for version in before} == before
    assert {json.loads(text)["worker"] for text in after.values()} <= {"killed", "one", "other"}
    metrics = both[0].get("/metrics").text
    assert "digenrl_evaluation_version 5.0" in metrics
    assert "digenrl_evaluation_pending 0.0" in metrics
    assert 'digenrl_evaluation_score{kind="training",scorer="proxy"}' in metrics
    assert os.getpriority(os.PRIO_PROCESS, both[1].process.pid) == 19
    for each in both:
        each.process.terminate()
        assert each.process.wait(timeout=20) == 0


@pytest.mark.slow
async def test_once_ends_with_what_is_due_by_now(
    folder_store: ObjectStore, tmp_path: Path, start: Start
) -> None:
    unknown = start("--once")
    assert unknown.process.wait(timeout=PATIENCE_S) == 2
    assert "holds no run 'digits'" in (tmp_path / "log").read_text()

    recipe = await begin(folder_store, run__steps=9)
    await commit_up_to(folder_store, recipe, 3)
    assert start("--once", "--every", "3").process.wait(timeout=PATIENCE_S) == 0
    assert sorted(records(tmp_path)) == [0, 3]


@pytest.mark.slow
async def test_asked_to_end_it_does_not_finish_an_evaluation_first(
    folder_store: ObjectStore, tmp_path: Path, start: Start
) -> None:
    recipe = await begin(folder_store, evaluation__steps=1000, evaluation__samples_per_prompt=99)
    await commit_up_to(folder_store, recipe, 0)
    busy = start("--worker", "busy")
    wait_for(lambda: '"evaluating"' in (tmp_path / "log").read_text())
    busy.process.terminate()
    assert busy.process.wait(timeout=30) == 0
    assert records(tmp_path) == {}
