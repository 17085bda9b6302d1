"""`digenrl status` and `digenrl logs`: of a run in a folder, and of a scheduler that answers."""

import asyncio
import json
from pathlib import Path

import httpx
import pytest
from typer.testing import CliRunner

from digenrl.cli import app
from digenrl.commands.logs import fields_of
from digenrl.view.live import LiveRun
from digenrl.view.state import live_state
from shared.errors import DigenRLError
from tests.follow.runs import RUN, Run

LOGS: dict[str, list[dict[str, object]]] = {
    "trainer-0": [
        {"ts": "2026-11-23T10:00:02.5Z", "level": "info", "event": "stepped", "version": 3},
        {"ts": "2026-11-23T10:00:04.5Z", "level": "error", "event": "lost", "svc": "trainer"},
    ],
    "rollout-0": [{"ts": "2026-11-23T10:00:03.5Z", "level": "debug", "event": "generated"}],
}


@pytest.fixture
def stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    run = Run(tmp_path / "objects").begin()
    run.commit(3)
    monkeypatch.setenv("DIGENRL_STORE_URL", run.settings.store_url)
    return run


def invoke(*arguments: str) -> str:
    found = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert found.exit_code == 0, found.output
    return found.stdout


def test_a_run_that_is_over_is_told_from_its_store(stored: Run, tmp_path: Path) -> None:
    text = invoke("status", RUN, "--runs", str(tmp_path))
    assert text.startswith("test: not running; stopped after step 3; step 3 of 30, reward 0.750\n")
    state = json.loads(invoke("status", RUN, "--runs", str(tmp_path), "--json"))
    assert (state["phase"], state["step"], state["workers"]) == ("over", 3, [])


def test_a_run_that_is_not_there_is_named(stored: Run, tmp_path: Path) -> None:
    with pytest.raises(DigenRLError, match="the store holds no run 'other'"):
        invoke("status", "other", "--runs", str(tmp_path))
    with pytest.raises(DigenRLError, match="does not answer, or refuses the token"):
        invoke("status", RUN, "--scheduler", "http://127.0.0.1:1", "--runs", str(tmp_path))


def test_a_live_run_is_told_by_its_scheduler() -> None:
    run = {
        "run": "demo", "phase": "running", "waiting_for": "trainer", "step": 2, "steps": 9,
        "eta_seconds": 75.2, "reward_mean": 0.5, "missing_workers": [], "failure": None,
        "num_dead_letters": 0,
    }  # fmt: skip
    answers: dict[str, object] = {
        "/v1/run": run,
        "/v1/workers": [{"service": "rollout"}, {"service": "rollout"}],
    }
    for batch in range(2):
        devices = {"rollout-0": {"generating": 1.0, "waiting_for_trainer": 3.0}}
        usage = {"batch": batch, "seconds": 4.0, "devices": devices}
        answers[f"/v1/batches/{batch}/usage"] = usage

    def answer(request: httpx.Request) -> httpx.Response:
        return httpx.Response(200, json=answers[request.url.path])

    live = LiveRun("http://scheduler", httpx.AsyncClient(transport=httpx.MockTransport(answer)))
    state = asyncio.run(live_state(live))
    assert state is not None and not state.is_over
    first, workers, wait = state.lines()
    assert first == "demo: running, waits for trainer; step 2 of 9, reward 0.500, 1:15 left"
    assert workers == "workers: 2 rollout" and "at work 25%" in wait


@pytest.fixture
def logs(tmp_path: Path) -> Path:
    folder = tmp_path / RUN / "logs"
    folder.mkdir(parents=True)
    for name, lines in LOGS.items():
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (folder / f"{name}.log").write_text(text + "Traceback\nunfinished"[: 10 * len(lines)])
    return tmp_path


def test_logs_of_all_services_come_in_the_order_of_time(logs: Path) -> None:
    lines = invoke("logs", RUN, "--runs", str(logs)).splitlines()
    assert lines == [
        "10:00:02.5Z trainer-0 info: stepped version=3",
        "10:00:03.5Z rollout-0 debug: generated",
        "rollout-0: Traceback",
        "10:00:04.5Z trainer-0 error: lost",
        "trainer-0: Traceback",
    ]
    arguments = ("--service", "trainer-0", "--level", "error", "--json")
    found = invoke("logs", RUN, "--runs", str(logs), *arguments).splitlines()
    assert fields_of(found[0])["event"] == "lost"


@pytest.mark.parametrize(
    ("arguments", "fault"),
    [
        (("--service", "rollout-7"), "--service: rollout-7 is none of rollout-0, trainer-0"),
        (("--level", "loud"), "--level: loud is none of debug, info"),
        (("--runs", "nowhere"), "holds no logs"),
    ],
)
def test_what_is_not_there_is_named(logs: Path, arguments: tuple[str, ...], fault: str) -> None:
    with pytest.raises(DigenRLError, match=fault):
        invoke("logs", RUN, "--runs", str(logs), *arguments)
