"""A process whose work hangs ends itself; one that waits, or was stopped, does not."""

import subprocess
import sys
import time

import pytest

from shared.errors import Unavailable
from shared.limits import DEADLINE_FACTOR, FIRST_DEADLINE_S, MIN_DEADLINE_S
from shared.process.watchdog import EXIT_HUNG, Watchdog, WorkInProgress
from shared.process.worker import Worker

HANGS = """
import asyncio, threading
from shared.process.watchdog import Watchdog
from shared.process.worker import Worker

async def main():
    worker = Worker("reward", "reward-0", "waiting_for_rollout")
    worker.progress.hard_s = 0.3
    Watchdog(worker.progress, look_s=0.05).start()
    with worker.doing("scoring"):
        await asyncio.to_thread(threading.Event().wait)

asyncio.run(main())
"""


def looked(watchdog: Watchdog, seconds: float, *, outage: bool = False) -> None:
    for _ in range(int(seconds)):
        watchdog.look(1.0, outage=outage)


def watched(hard_s: float | None = None) -> tuple[WorkInProgress, Watchdog, list[str]]:
    ended = list[str]()
    progress = WorkInProgress(hard_s=hard_s)
    return progress, Watchdog(progress, leave=ended.append), ended


def test_a_process_that_hangs_ends_with_a_status_of_its_own() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", HANGS], capture_output=True, text=True, timeout=60, check=False
    )
    assert ended.returncode == EXIT_HUNG
    assert "scoring has not ended" in ended.stdout + ended.stderr


def test_the_deadline_follows_from_what_such_work_took() -> None:
    progress, watchdog, _ = watched()
    assert progress.deadline("training") == FIRST_DEADLINE_S
    with progress.running("training"):
        looked(watchdog, 60)
    assert progress.deadline("training") == 60 * DEADLINE_FACTOR
    with progress.running("scoring"):
        looked(watchdog, 1)
    assert progress.deadline("scoring") == MIN_DEADLINE_S
    assert progress.deadline("generating") == FIRST_DEADLINE_S


def test_work_is_late_at_half_of_its_deadline_and_ends_the_process_at_all_of_it() -> None:
    progress, watchdog, ended = watched(hard_s=10.0)
    with progress.running("generating"):
        looked(watchdog, 6)
        assert "generating has not ended for 6 s" in progress.hangs(0.5)
        assert not ended
        looked(watchdog, 5)
        assert ended
    assert not progress.hangs()


def test_time_in_which_the_process_was_stopped_does_not_count() -> None:
    progress, watchdog, ended = watched(hard_s=10.0)
    with progress.running("generating"):
        watchdog.look(3600.0)
    assert not ended


def test_an_outage_does_not_count_for_work_that_waits_for_the_store() -> None:
    progress, watchdog, ended = watched(hard_s=10.0)
    with progress.running("loading_weights"):
        looked(watchdog, 60, outage=True)
        looked(watchdog, 9)
        assert not ended
        looked(watchdog, 2)
        assert ended
    assert progress.longest["loading_weights"] == 11


def test_a_device_hangs_in_an_outage_as_at_any_other_time() -> None:
    _, watchdog, ended = watched(hard_s=10.0)
    for kind in ("generating", "decoding", "encoding", "scoring", "training", "the optimizer step"):
        ended.clear()
        with watchdog.progress.running(kind):
            looked(watchdog, 11, outage=True)
        assert ended, kind


def test_who_finds_something_missing_says_when() -> None:
    before = time.monotonic()
    with pytest.raises(Unavailable):
        raise Unavailable("the store does not answer")
    assert Unavailable.noticed_at >= before


def test_a_worker_that_waits_does_not_hang() -> None:
    worker = Worker("trainer", "trainer", "waiting_for_rollout")
    with worker.doing("committing"):
        worker.progress.advance(1e6)
        assert not worker.progress.hangs()
    with worker.doing("training"):
        worker.progress.advance(1e6)
        assert worker.progress.hangs()
        assert "has not ended" in worker._status().note
