"""Pages of machines: logs, past alarms, a clock, and what remains after the end of a run."""

import asyncio
import json

import httpx
import pytest
from fastapi.testclient import TestClient

from digenrl.api.live import LiveRun
from digenrl.api.run_history import RunHistory
from digenrl.view.server import View, create_app
from shared.process.http_access import Access
from shared.run.layout import timeline_key, usage_key
from shared.run.log_entries import Alarm
from shared.run.usage import BatchUsage, Timeline
from tests.follow.runs import RUN, Run
from tests.run_log import append

COMMITTED_AT = 1_000_004.0


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> TestClient:
    """The pages of an ended run of a step, which an alarm interrupted a second before the end."""
    folder = tmp_path_factory.mktemp("run")
    run = Run(folder / "objects").begin()
    run.commit(1)
    asyncio.run(fill(run))
    (folder / "logs").mkdir()
    line = {
        "ts": "1970-01-12T13:46:43Z",
        "level": "error",
        "event": "scoring_failed",
        "url": "x?code=Zm9v",
    }
    (folder / "logs" / "reward-0.log").write_text(f"{json.dumps(line)}\n")
    view = View(RunHistory(run.store, RUN), LiveRun("", httpx.AsyncClient()), folder=folder)
    return TestClient(create_app(view, Access(is_open=True)), base_url="http://localhost")


async def fill(run: Run) -> None:
    changes = ((0.0, "generating"),)
    timeline = {
        "batch": 0,
        "seconds": 4.0,
        "devices": {"rollout-0": changes},
        "ended_at": COMMITTED_AT,
    }
    usage = {
        "batch": 0, "seconds": 4.0, "devices": {"rollout-0": {"generating": 4.0}},
        "machines": {"rollout-0": "NVIDIA H100 0 on node7"}, "device_hours": 1.25,
    }  # fmt: skip
    encoded = Timeline.model_validate(timeline).encode()
    await run.store.create(timeline_key(RUN, 0), encoded)
    stored = BatchUsage.model_validate(usage).model_dump_json().encode()
    await run.store.create(usage_key(RUN, 0), stored)
    alarms = (
        Alarm(
            what="nobody_works", firing=firing, reason="no device", at=COMMITTED_AT - 1 + 9 * late
        )
        for late, firing in enumerate((True, False))
    )
    await append(run.store, RUN, *alarms)


def test_a_timeline_has_a_clock_and_the_alarms_of_its_batches(client: TestClient) -> None:
    [batch] = client.get("/data/timeline").json()

    assert batch["ended_at"] == COMMITTED_AT
    assert batch["events"] == [[3.0, "alarm nobody_works: no device"]], "the second one came later"


def test_past_alarms_and_log_lines_are_on_one_page(client: TestClient) -> None:
    text = client.get("/logs").text

    assert "alarm nobody_works: no device" in text and "nobody_works is over" in text
    assert "reward-0 error: scoring_failed" in text and "Zm9v" not in text
    assert "scoring_failed" not in client.get("/logs?word=other").text
    assert client.get("/v1/logs?process=trainer-0").json()["lines"] == []


def test_machines_and_their_hours_remain_after_the_end(client: TestClient) -> None:
    text = client.get("/workers").text

    assert "NVIDIA H100 0 on node7" in text
    assert "<b>1.25</b> machine-hours" in text
    assert client.get("/v1/status").json()["device_hours"] == 1.25
