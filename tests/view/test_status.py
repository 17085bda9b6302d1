"""`digenrl status` and `digenrl logs`: of a run in a folder, and of a scheduler that answers."""

import asyncio
import json
from pathlib import Path

import httpx
import pytest
from typer.testing import CliRunner

from digenrl.api.checked_client import CheckedClient
from digenrl.api.run_logs import parse_line
from digenrl.commands import status
from digenrl.commands.cli import app
from digenrl.local import connection
from digenrl.local.runs import write_address
from shared.errors import DigenRLError
from shared.run.log_entries import PhaseChange
from tests.follow import runs
from tests.follow.runs import RUN, Run
from tests.readings import LOAD, WORKER
from tests.readings import RUN as NOW
from tests.run_log import append

LOGS: dict[str, list[dict[str, object]]] = {
    "trainer-0": [
        {"ts": "2026-11-23T10:00:02.5Z", "level": "info", "event": "stepped", "version": 3},
        {"ts": "2026-11-23T10:00:04.5Z", "level": "error", "event": "lost", "svc": "trainer"},
    ],
    "rollout-0": [{"ts": "2026-11-23T10:00:03.5Z", "level": "debug", "event": "generated"}],
}

A_TAG = {
    "mode": "auto", "groups": 0, "lent": 1, "members": 2, "samples_left": 4,
    "costs": {"help_per_sample": 0.5, "train_per_group": 0.9, "ready": 0.1, "commit": 0.2,
              "switch": 0.05},
    "decisions": [],
}  # fmt: skip


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
    assert (state["phase"], state["step"], state["workers"]) == ("stopped", 3, [])


def test_a_run_that_is_not_there_is_named(stored: Run, tmp_path: Path) -> None:
    with pytest.raises(DigenRLError, match="the store holds no run 'other'"):
        invoke("status", "other", "--runs", str(tmp_path))
    with pytest.raises(DigenRLError, match=r"--scheduler: http://127\.0\.0\.1:1 does not answer"):
        invoke("status", RUN, "--scheduler", "http://127.0.0.1:1", "--runs", str(tmp_path))


def version_view(version: int, *, digest: str) -> dict[str, object]:
    return {
        "version": version, "weights_digest": digest, "weights": "key", "trained_from_batch": None,
        "reward_mean": None, "onpolicy_ratio_error": None, "adopted_by": [],
    }  # fmt: skip


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, object]:
    """Answers of a scheduler of the run ``test`` by their paths, which commands find."""
    answers: dict[str, object] = {
        "/v1/run": NOW, "/v1/workers": [WORKER, WORKER], "/v1/load": LOAD,
        "/v1/dead-letters": [], "/v1/tag": A_TAG,
        "/v1/batches": [],
        "/v1/versions": [version_view(number, digest="0" * 64) for number in range(7, 1, -1)],
    }  # fmt: skip
    for batch in range(2):
        devices = {"rollout-0": {"generating": 1.0, "waiting_for_trainer": 3.0}}
        usage = {"batch": batch, "seconds": 4.0, "devices": devices}
        answers[f"/v1/batches/{batch}/usage"] = usage

    def answer(request: httpx.Request) -> httpx.Response:
        found = answers.get(request.url.path)
        if isinstance(found, list) and request.url.path == "/v1/run":
            found = found.pop(0)
        return httpx.Response(
            404 if found is None else 200, json={"detail": "no"} if found is None else found
        )

    def client_of(*_: object, **__: object) -> CheckedClient:
        transport = httpx.MockTransport(answer)
        return CheckedClient(httpx.Client(transport=transport, base_url="http://scheduler"))

    monkeypatch.setattr(connection, "connect_client", client_of)
    (tmp_path / RUN).mkdir()
    write_address(tmp_path / RUN, "http://scheduler")
    return answers


def test_a_live_run_is_told_by_its_scheduler(served: dict[str, object], tmp_path: Path) -> None:
    served["/v1/run"] = NOW | {"waiting_for": "trainer", "step": 2, "eta_seconds": 75.2}
    told = invoke("status", RUN, "--runs", str(tmp_path)).splitlines()
    first, still, late, wait, pace, queued, workers, health = told
    assert health.startswith("2 workers report without a fault; rollout-0 is far slower")
    assert still.startswith("! the weights have not changed since version 2")
    assert pace.startswith("10 samples are trained per second; the schedule's forecast is 20")
    assert late.startswith("! 8 samples at devices that generate, the oldest at rollout-0 for 61 s")
    assert first == "test: running, waits for training; step 2 of 30, reward 0.500, 1 min 15 s left"
    assert queued.startswith("waiting: ")
    assert workers == "workers: 2 rollout" and "at work 25%" in wait
    state = json.loads(invoke("status", RUN, "--runs", str(tmp_path), "--json"))
    assert state["workers"][0] == WORKER and state["phase"] == "running"
    assert state["load"] == LOAD


def test_a_run_is_watched_until_it_ends_and_one_that_has_ended_is_told_once(
    served: dict[str, object], stored: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(status, "POLL_S", 0.0)
    ended = NOW | {"phase": "finished"}
    served["/v1/run"] = [NOW, NOW, NOW, ended]  # the first one says only whose scheduler it is
    found = invoke("watch", RUN, "--runs", str(tmp_path), "--json").splitlines()
    assert [json.loads(line)["phase"] for line in found[:2]] == ["running", "finished"]
    # Another run has the port now.
    served["/v1/run"] = NOW | {"run": "other"}
    [line] = invoke("watch", RUN, "--runs", str(tmp_path), "--json").splitlines()
    assert (json.loads(line)["phase"], json.loads(line)["step"]) == ("stopped", 3)
    assert "stopped after step 3" in invoke("watch", RUN, "--runs", str(tmp_path))


def test_a_run_that_has_failed_says_why_after_its_end(stored: Run, tmp_path: Path) -> None:
    change = PhaseChange(before="running", phase="failed", failure="the disk is full")
    asyncio.run(append(stored.store, RUN, change))
    found = CliRunner().invoke(app, ["watch", RUN, "--runs", str(tmp_path)])
    assert found.exit_code == 1 and "! the run has failed: the disk is full" in found.stdout


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
        "10:00:03.5Z rollout-0 error: Traceback",
        "10:00:04.5Z trainer-0 error: lost",
        "10:00:04.5Z trainer-0 error: Traceback",
    ]
    arguments = ("--service", "trainer-0", "--level", "error", "--json")
    found = invoke("logs", RUN, "--runs", str(logs), *arguments).splitlines()
    assert parse_line(found[0], 2026)["event"] == "lost"


@pytest.mark.parametrize(
    ("arguments", "fault"),
    [
        (
            ("--service", "rollout-7"),
            "--service: rollout-7 is unknown; use one of rollout-0, trainer-0",
        ),
        (("--level", "loud"), "--level: loud is unknown; use one of debug, info"),
        (("--runs", "nowhere"), "holds no logs"),
    ],
)
def test_what_is_not_there_is_named(logs: Path, arguments: tuple[str, ...], fault: str) -> None:
    with pytest.raises(DigenRLError, match=fault):
        invoke("logs", RUN, "--runs", str(logs), *arguments)


def test_a_finished_run_that_trained_nothing_is_told_so(
    stored: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dead = {"advantage_std": 0.0, "reward_std": 0.0, "failed_fraction": 0.0, "dropped_groups": 0.0}
    monkeypatch.setattr(runs, "metrics_of", lambda version: {"reward_mean": 1.0, **dead})
    stored.commit(1)
    told = invoke("status", RUN, "--runs", str(tmp_path)).splitlines()
    assert next(each for each in told if "trained nothing" in each).endswith(
        "the reward is saturated: every sample has 1, the best value of the run"
    )
