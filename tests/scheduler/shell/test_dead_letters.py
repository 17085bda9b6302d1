"""Dead letters: found once, kept in the store, shown in pages, and settled."""

import asyncio
from dataclasses import replace
from typing import cast
from unittest.mock import AsyncMock

import pytest
from fastapi.testclient import TestClient

from services.scheduler import limits
from services.scheduler.shell.app import Scheduler
from services.scheduler.shell.dead_letters import DeadLetters, failure_of, letter_of, make_letter
from services.scheduler.shell.run_log import RunLog
from shared.bus.bus import Bus
from shared.bus.reader import ReceivedMessage
from shared.errors import Unavailable
from shared.messages.codec import encode
from shared.messages.contracts import (
    FragmentFailed,
    FragmentSlot,
    GroupFailed,
    GroupRequest,
    OperatorRequest,
)
from shared.messages.subjects import unscored_subject
from shared.run.log import Log
from shared.run.log_entries import PhaseChange, Work
from tests import examples
from tests.scheduler.shell.served import Outbox

GIVEN = "its group was given to be trained"
SLOT = FragmentSlot(batch=1, group=1, first_sample=2, attempt=0)


def failed(batch: int = 1, attempt: int = 0, reason: str = "no pixels") -> FragmentFailed:
    slot = SLOT.model_copy(update={"batch": batch, "attempt": attempt})
    return FragmentFailed(slot=slot, stage="reward", reason=reason, worker=None)


def keep(log: RunLog, number: int) -> None:
    """Store what was found, until there are so many letters."""

    async def run() -> None:
        writing = asyncio.create_task(log.write())
        async with asyncio.timeout(10):
            while len(log.letters.letters) < number or not log._waiting.empty():  # noqa: ASYNC110
                await asyncio.sleep(0)
        writing.cancel()
        await asyncio.gather(writing, return_exceptions=True)

    asyncio.run(run())


def another(scheduler: Scheduler) -> tuple[DeadLetters, RunLog]:
    """Return what another scheduler of the run has."""
    log = RunLog(Log.of_run(scheduler.store, "test"))
    return DeadLetters(scheduler.bus, log, lambda _: None), log


@pytest.fixture
def three(scheduler: Scheduler) -> Scheduler:
    """Has three letters: two attempts at one fragment, and one at a group of a batch that is
    committed."""
    for each in (failed(), failed(attempt=1), GroupFailed(batch=0, group=0, attempt=0, reason="x")):
        scheduler.dead_letters.note(each)
    keep(scheduler.run_log, 3)
    return scheduler


def test_a_run_that_fails_behind_many_letters_has_failed_in_its_log(scheduler: Scheduler) -> None:
    letters, log = another(scheduler)
    for attempt in range(200):
        letters.note(failed(attempt=attempt))

    async def end() -> list[str]:
        writing = asyncio.create_task(log.write())
        while not log.letters.letters:  # noqa: ASYNC110
            await asyncio.sleep(0)
        log.change_phase("failed", "too few samples")
        writing.cancel()
        await asyncio.gather(writing, return_exceptions=True)
        stored = Log.of_run(scheduler.store, "test")
        await stored.look()
        return [each.phase for each in stored.entries if isinstance(each, PhaseChange)]

    assert asyncio.run(end()) == ["failed"]


def test_the_same_failure_is_one_letter_also_for_the_next_scheduler(scheduler: Scheduler) -> None:
    (first, first_log), (second, second_log) = another(scheduler), another(scheduler)
    first.note(failed())
    first.note(failed())
    first.note(failed(attempt=1))
    first.note(examples.published(1))  # no failure
    keep(first_log, 2)
    second.note(failed(attempt=1))
    second.note(failed(attempt=2))
    keep(second_log, 3)
    stored = second_log.letters
    assert [*stored.letters] == [1, 2, 3]
    assert [each.work.attempt for each in stored.letters.values() if each.work] == [0, 1, 2]


def test_a_number_that_another_scheduler_took_meanwhile_is_left_to_it(scheduler: Scheduler) -> None:
    (mine, my_log), (others, others_log) = another(scheduler), another(scheduler)
    keep(my_log, 0)
    others.note(failed(reason="by another"))
    keep(others_log, 1)
    mine.note(failed())
    keep(my_log, 2)
    reasons = [each.reason for each in my_log.letters.letters.values()]
    assert reasons == ["reward: by another", "reward: no pixels"]


def test_a_log_keeps_the_first_letters_alone_and_every_phase(
    scheduler: Scheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "MAX_LETTERS", 2)
    letters, log = another(scheduler)
    letters.note(failed())
    keep(log, 1)
    for attempt in range(1, 4):
        letters.note(failed(attempt=attempt))
        log.change_phase(f"phase {attempt}", None)
    keep(log, 2)
    stored = Log.of_run(scheduler.store, "test")
    asyncio.run(stored.look())
    events = [each.event for each in stored.entries][:4]  # the last one may not be stored yet
    assert events == ["dead_letter", "dead_letter", "phase", "phase"]


def test_letters_come_in_pages_newest_first(three: Scheduler, client: TestClient) -> None:
    first = client.get("/v1/dead-letters?state=all&limit=2").json()
    assert [each["number"] for each in first] == [3, 2]
    before = first[-1]["number"]
    last = client.get(f"/v1/dead-letters?state=all&limit=2&before={before}").json()
    assert [each["number"] for each in last] == [1]
    assert last[0]["reason"] == "reward: no pixels"
    assert last[0]["work"] == {"batch": 1, "group": 1, "first_sample": 2, "attempt": 0}
    shown = client.get("/v1/dead-letters/1").json()
    assert shown["num_bytes"] == len(encode(failed()))
    assert client.get("/v1/dead-letters/9").status_code == 404


def test_a_letter_is_open_while_something_can_be_done_about_it(
    three: Scheduler, client: TestClient
) -> None:
    """The newest of a piece of work, until its group is given or its batch committed."""

    def states() -> list[str]:
        number = client.get("/v1/run").json()["num_dead_letters"]
        found = [each["state"] for each in client.get("/v1/dead-letters?state=all").json()]
        assert number == found.count("open")
        return found

    assert states() == ["over", "open", "over"]
    assert client.get("/v1/dead-letters/1").json()["state"] == "over"
    batch = three.state.batch
    assert batch is not None
    before = three.state
    given = replace(batch.groups[1], sent=True)
    three.state = before.with_group(batch.index, 1, given)
    assert states() == ["over"] * 3
    three.state = before
    assert states()[1] == "open"
    three.state = replace(before, phase="finished")
    assert states() == ["over"] * 3


def test_dropping_is_durable_and_twice_the_same_as_once(
    three: Scheduler, client: TestClient
) -> None:
    for _ in range(2):
        assert client.post("/v1/dead-letters/2/drop").json()["state"] == "dropped"
    assert client.get("/v1/dead-letters").json() == []
    everything = client.get("/v1/dead-letters?state=all").json()
    assert [each["state"] for each in everything] == ["over", "dropped", "over"]
    assert client.post("/v1/dead-letters/2/retry").status_code == 409
    _, again = another(three)
    keep(again, 3)
    assert again.letters.settled == {2: "dropped"}


def test_a_retry_resumes_a_run_that_has_failed_once(three: Scheduler, client: TestClient) -> None:
    three.state = replace(three.state, phase="failed", failure="no pixels")
    assert (
        client.post("/v1/dead-letters/1/retry").json()["note"]
        == "the run goes on, and does it again"
    )
    assert "before" in client.post("/v1/dead-letters/1/retry").json()["note"]
    [request] = cast(Outbox, three.bus).published
    assert isinstance(request, OperatorRequest) and request.action == "resume"


def test_a_retry_whose_record_is_lost_can_be_repeated_with_the_same_request(
    three: Scheduler, client: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as outage:
        outage.setattr(type(three.store), "create", AsyncMock(side_effect=Unavailable("away")))
        assert client.post("/v1/dead-letters/2/retry").status_code == 503
    assert client.get("/v1/dead-letters/2").json()["state"] == "open"
    assert client.post("/v1/dead-letters/2/retry").json()["state"] == "retried"
    first, again = cast(Outbox, three.bus).published
    assert first == again, "it resets the attempts of the group once more"


def test_a_retry_says_what_follows_and_what_does_not(three: Scheduler, client: TestClient) -> None:
    retried = client.post("/v1/dead-letters/1/retry").json()
    assert (retried["number"], retried["note"]) == (2, "it is being done again"), "the newest"
    assert [each["state"] for each in client.get("/v1/dead-letters?state=all").json()] == [
        "over", "retried", "over",
    ]  # fmt: skip
    answer = client.post("/v1/dead-letters/3/retry")
    assert answer.status_code == 409
    assert answer.json()["detail"] == "nothing is left to do: batch 0 is committed"
    [request] = cast(Outbox, three.bus).published
    assert isinstance(request, GroupRequest) and (request.batch, request.group) == (1, 1)


def test_what_could_not_be_scored_is_done_again_until_its_group_is_trained(
    scheduler: Scheduler, client: TestClient
) -> None:
    scheduler.state = replace(scheduler.state, phase="paused")
    batch = scheduler.state.batch
    assert batch is not None
    for number, sent in enumerate((False, True)):
        work = Work(batch=batch.index, group=number, first_sample=0)
        found = make_letter("unscored", "DG_DLQ", f"s{number}", "no text", b"{}", work)
        scheduler.run_log.put(found)
        group = replace(batch.groups[number], sent=sent)
        scheduler.state = scheduler.state.with_group(work.batch, number, group)
    keep(scheduler.run_log, 2)
    assert [
        (each["outcome"], each["state"]) for each in client.get("/v1/dead-letters?state=all").json()
    ] == [(GIVEN, "over"), ("", "open")]
    note = client.post("/v1/dead-letters/1/retry").json()["note"]
    assert note == "it is done again when the run is resumed"
    answer = client.post("/v1/dead-letters/2/retry")
    assert answer.status_code == 409 and GIVEN in answer.json()["detail"]
    assert len(cast(Outbox, scheduler.bus).published) == 1


def test_a_message_without_work_is_kept_and_can_only_be_dropped(
    scheduler: Scheduler, client: TestClient
) -> None:
    forged = examples.published(1 << 40, worker="nobody")
    scheduler.dead_letters.refuse(forged, "there is no such commit record")
    keep(scheduler.run_log, 1)
    assert client.get("/v1/dead-letters").json()[0]["kind"] == "refused"
    answer = client.post("/v1/dead-letters/1/retry")
    assert answer.status_code == 409
    assert answer.json()["detail"] == "nothing is left to do: only failed work can be retried"
    assert client.post("/v1/dead-letters/1/drop").json()["state"] == "dropped"
    assert cast(Outbox, scheduler.bus).published == []


class Stored(Outbox):
    """Stands where the bus is; has one stored message."""

    def __init__(self, subject: str) -> None:
        super().__init__()
        self.subject = subject

    async def stored_message(self, stream: str, sequence: int) -> tuple[str, bytes]:
        return self.subject, b"stored"


@pytest.mark.parametrize("subject", ["dg.test.traj.a-0.1.0.2.0", "dg.test.evt.group_failed", ""])
def test_which_work_bytes_are_about_only_the_stream_says(subject: str) -> None:
    bus = cast(Bus, Stored(subject))
    headers = {"dg-subject": "dg.test.traj.a-0.1.0.0.0", "dg-reason": "not msgpack"}
    received = ReceivedMessage(None, "dg.test.quarantine.DG_TRAJ.7", b"\xc1", headers)
    found = asyncio.run(letter_of(bus, received))
    assert found is not None
    assert (found.kind, found.reason, found.bytes) == ("unreadable", "not msgpack", b"\xc1")
    assert found.subject == subject or not subject
    assert (found.work is not None) == (".traj." in subject)


def test_an_outage_of_nats_ends_no_scheduler_that_reads_a_dead_letter() -> None:
    class Away(Stored):
        asked = 0

        async def stored_message(self, stream: str, sequence: int) -> tuple[str, bytes]:
            self.asked += 1
            if self.asked == 1:
                raise Unavailable("NATS does not answer")
            return await super().stored_message(stream, sequence)

    bus = cast(Bus, Away("dg.test.traj.a-0.1.0.2.0"))
    received = ReceivedMessage(None, "dg.test.quarantine.DG_TRAJ.7", b"\xc1", {})
    found = asyncio.run(letter_of(bus, received))
    assert found is not None and found.work is not None


def test_samples_without_a_score_are_a_letter_and_no_failure() -> None:
    bus = cast(Bus, Stored(""))
    headers = {"dg-subject": "dg.test.traj.a-0.1.0.2.0", "dg-reason": "ocr: sample 3: no text"}
    subject = unscored_subject("test", SLOT)
    found = asyncio.run(letter_of(bus, ReceivedMessage(None, subject, b"{}", headers)))
    assert found is not None and found.work is not None
    assert (found.kind, found.work.group, found.work.first_sample) == ("unscored", 1, 2)
    assert found.reason == "reward: ocr: sample 3: no text", "as of a failed attempt"
    assert failure_of(found) is None
    odd = ReceivedMessage(None, "dg.test.quarantine.unscored.1-x-2", b"{}", headers)
    assert asyncio.run(letter_of(bus, odd)) is None


def test_a_damaged_letter_is_left_out(three: Scheduler, client: TestClient) -> None:
    log = Log.of_run(three.store, "test")
    client.post("/v1/dead-letters/2/drop")
    asyncio.run(three.store.write(log.key(1), b"{"))
    _, again = another(three)
    keep(again, 2)
    assert [*again.letters.letters] == [2, 3] and again.letters.settled == {2: "dropped"}
