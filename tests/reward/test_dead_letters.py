"""Samples that a scorer could not score: they have no score, and the dead letters say why."""

import asyncio
import json

import pytest

from services.scheduler.shell.dead_letters import DeadLetters
from services.scheduler.shell.run_log import RunLog
from shared.bus.bus import Bus
from shared.errors import SamplesFailed
from shared.messages import subjects
from shared.messages.contracts import FragmentFailed, FragmentScored
from shared.run.log import Log
from shared.store import ObjectStore
from tests import examples
from tests.reward.on_bus import app_of, first, generated

pytestmark = pytest.mark.broker


class Afraid:
    def score(self, images: object, metadata: object, /) -> list[float]:
        raise SamplesFailed([0.5, None], {1: "it hangs"}, final=[1])


async def test_why_a_sample_has_no_score_is_a_dead_letter_and_no_failure_of_its_fragment(
    bus: Bus, folder_store: ObjectStore
) -> None:
    await bus.publish(examples.task())
    event = await generated(folder_store)
    await bus.publish(event)
    put: asyncio.Queue[object] = asyncio.Queue()
    log = RunLog(Log.of_run(folder_store, "test"))
    letters = DeadLetters(bus, log, put.put_nowait)
    app = app_of(bus, folder_store, Afraid())
    running = [asyncio.create_task(each) for each in (app.run(), letters.follow())]
    [scored] = await first(bus, subjects.REW, 1)
    assert isinstance(scored, FragmentScored) and scored.rewards == (0.5, None)
    slot = event.fragment.slot
    subject = subjects.unscored_subject("test", slot)
    letter = await bus.jetstream.get_last_msg("DG_DLQ", subject)
    sample = event.fragment.first_sample + 1
    assert json.loads(letter.data or b"") == {
        "scorer": "proxy", "samples": {str(sample): "it hangs"},
    }  # fmt: skip
    assert letter.headers is not None
    assert letter.headers["dg-reason"] == "proxy: it hangs"
    assert letter.headers["dg-subject"] == subjects.message_subject("test", event)
    await bus.jetstream.publish("dg.test.quarantine.DG_TRAJ.1", b"")
    assert isinstance(await asyncio.wait_for(put.get(), 20), FragmentFailed)
    assert letters.num_quarantined == 1 and put.empty()
    for task in running:
        task.cancel()
    await asyncio.gather(*running, return_exceptions=True)
