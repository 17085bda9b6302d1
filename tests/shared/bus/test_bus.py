"""The bus on a real NATS server, which is killed in the middle."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from digenrl.local.brokers.embedded import Brokers
from shared.bus import marks
from shared.bus.bus import Bus
from shared.bus.reader import ReceivedMessage
from shared.errors import SlotPoisoned, Unavailable
from shared.messages import subjects
from shared.messages.contracts import Message, OperatorRequest, SetDevice
from tests import examples
from tests.brokers import StartProgram, program
from tests.waiting import until


async def take(bus: Bus, stream: subjects.Stream, count: int) -> list[ReceivedMessage]:
    found: list[ReceivedMessage] = []
    async with asyncio.timeout(30), contextlib.aclosing(bus.follow(stream)) as following:
        async for received in following:
            found.append(received)
            if len(found) == count:
                break
    return found


async def test_a_slot_takes_one_message_whoever_publishes_it(bus: Bus) -> None:
    assert await bus.publish(examples.task())
    assert not await bus.publish(examples.task())
    assert await bus.publish(examples.task(attempt=1))
    assert len(await take(bus, subjects.TASK, 2)) == 2


async def test_of_what_many_say_at_a_time_the_broker_keeps_one_message(bus: Bus) -> None:
    """Every fluid member that starts tells all others of the newest version."""
    one, other = (
        examples.published(7),
        examples.published(7).model_copy(update={"worker": "another"}),
    )
    assert await bus.publish(one, once="again.7")
    assert not await bus.publish(other, once="again.7")
    assert await bus.publish(other, once="again.8")
    assert await bus.publish(other), "of which it is not said"
    kept = await take(bus, subjects.EVT, 3)
    assert [each.message for each in kept] == [one, other, other]


async def test_a_bus_says_for_how_long_a_message_waits_to_be_stored(nats_url: str) -> None:
    async with Bus.connect(nats_url, run="test", name="test") as bus:
        publishing = asyncio.create_task(bus.publish(examples.task()))
        await until(lambda: bus.seconds_unstored >= 0.2)  # there is no stream for it
        await bus.ensure_streams()
        assert await asyncio.wait_for(publishing, 30)
        assert bus.seconds_unstored == 0


def test_slots_stay_taken_when_the_server_is_killed(brokers: Brokers, start: StartProgram) -> None:
    url = brokers.environment["DIGENRL_NATS_URL"]

    async def before() -> None:
        async with Bus.connect(url, run="test", name="test") as bus:
            await bus.ensure_streams()
            await bus.publish(examples.task())
            await bus.publish(examples.generated(examples.task()))
            async with await bus.queue(subjects.TRAJ, "reward").next():
                pass

    async def after() -> None:
        async with Bus.connect(url, run="test", name="test") as bus:
            await bus.ensure_streams()
            assert not await bus.publish(examples.task())

    server = start(program(brokers, "nats"))
    asyncio.run(before())
    server.kill()
    server.wait()
    start(program(brokers, "nats"))
    asyncio.run(after())


async def test_work_is_given_to_one_worker_and_again_if_it_fails(nats_url: str) -> None:
    async with (
        Bus.connect(nats_url, run="test", name="one") as one,
        Bus.connect(nats_url, run="test", name="two") as two,
    ):
        await one.ensure_streams()
        await one.publish(examples.task())
        with pytest.raises(RuntimeError):
            async with await one.queue(subjects.TASK, "rollout").next():
                raise RuntimeError("the device is lost")
        async with asyncio.timeout(10):
            delivery = await two.queue(subjects.TASK, "rollout").next()
        async with delivery as task:
            assert task == examples.task()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(1):
                await one.queue(subjects.TASK, "rollout").next()


async def test_followers_see_everything_in_order_from_the_first_message(bus: Bus) -> None:
    sent: list[Message] = [OperatorRequest(action="pause", id=str(number)) for number in range(50)]
    for message in sent:
        await bus.publish(message)
    assert [received.message for received in await take(bus, subjects.EVT, 50)] == sent


async def test_a_follower_misses_nothing_when_the_server_is_killed(
    brokers: Brokers, start: StartProgram
) -> None:
    server = await asyncio.to_thread(start, program(brokers, "nats"))
    url = brokers.environment["DIGENRL_NATS_URL"]
    async with Bus.connect(url, run="test", name="test") as bus:
        await bus.ensure_streams()
        following = asyncio.create_task(take(bus, subjects.EVT, 20))
        for number in range(20):
            if number == 10:
                server.kill()
                server.wait()
                await asyncio.to_thread(start, program(brokers, "nats"))
            await bus.publish(OperatorRequest(action="pause", id=str(number)))
        seen = [received.message for received in await following]
        ids = [message.id for message in seen if isinstance(message, OperatorRequest)]
        assert list(dict.fromkeys(ids)) == [str(number) for number in range(20)]


async def test_a_follower_sees_all_of_a_stream_that_takes_the_place_of_another(
    bus: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NATS is wiped, and the scheduler makes the stream again just before the reader is there."""
    sent: list[Message] = [OperatorRequest(action="pause", id=str(number)) for number in range(5)]
    add = bus.jetstream.add_consumer

    async def add_late(*given: Any) -> Any:
        monkeypatch.setattr(bus.jetstream, "add_consumer", add)
        await bus.ensure_streams()
        for message in sent[3:]:
            await bus.publish(message)
        return await add(*given)

    for message in sent[:3]:
        await bus.publish(message)
    found: list[Message | None] = []
    async with asyncio.timeout(30), contextlib.aclosing(bus.follow(subjects.EVT)) as following:
        async for received in following:
            found.append(received.message)
            if len(found) == 3:
                monkeypatch.setattr(bus.jetstream, "add_consumer", add_late)
                await bus.jetstream.delete_stream(subjects.EVT.name)
            if len(found) == 5:
                break
    assert found == sent


async def test_bytes_that_are_no_message_are_quarantined_and_stop_nobody(bus: Bus) -> None:
    await bus.jetstream.publish("dg.test.task.rollout-0.0.0.0.0", b"\xc1 no message")
    await bus.publish(examples.task(group=1))
    async with asyncio.timeout(10):
        async with await bus.queue(subjects.TASK, "rollout").next() as task:
            assert task == examples.task(group=1)
    [kept] = await take(bus, subjects.DLQ, 1)
    assert kept.data == b"\xc1 no message"
    assert kept.subject == "dg.test.quarantine.DG_TASK.1"


async def test_the_publisher_to_a_slot_taken_by_garbage_gets_an_error(bus: Bus) -> None:
    await bus.jetstream.publish("dg.test.task.rollout-0.0.0.0.0", b"garbage")
    with pytest.raises(SlotPoisoned):
        await bus.publish(examples.task())


async def test_a_batch_that_is_forgotten_leaves_the_others(bus: Bus) -> None:
    await bus.publish(examples.task(batch=1))
    await bus.publish(examples.task(batch=11))
    await bus.forget_batch(1)
    [left] = await take(bus, subjects.TASK, 1)
    assert left.message == examples.task(batch=11)


async def test_work_that_is_never_finished_is_reported(
    bus: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shared.bus.queue.ACK_WAIT_S", 0.3)
    monkeypatch.setattr("shared.bus.queue.MAX_DELIVERIES", 2)
    await bus.publish(examples.task())
    queue = bus.queue(subjects.TASK, "rollout")
    for _ in range(2):
        await queue.next()  # claimed, and then the worker dies
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(3):
            await queue.next()
    [advisory] = await take(bus, subjects.DLQ, 1)
    assert json.loads(advisory.data)["stream_seq"] == 1


async def test_nobody_answering_is_an_error_that_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shared.bus.connection.BROKER_CONNECT_S", 1.0)
    with pytest.raises(
        Unavailable, match=r"DIGENRL_NATS_URL: NATS at nats://127\.0\.0\.1:1 does not answer"
    ):
        async with Bus.connect("nats://127.0.0.1:1", run="x", name="x"):
            pass


async def test_what_is_stored_can_be_read_and_then_followed_without_a_gap(bus: Bus) -> None:
    assert await bus.stored(subjects.TASK) == ([], 0)
    await bus.publish(examples.task(group=0))
    await bus.publish(examples.task(group=1))
    found, last = await bus.stored(subjects.TASK)
    assert [received.message for received in found] == [
        examples.task(group=0), examples.task(group=1)
    ]  # fmt: skip
    await bus.publish(examples.task(group=2))
    async with asyncio.timeout(30):
        async for received in bus.follow(subjects.TASK, after=last):
            assert received.message == examples.task(group=2)
            break


async def test_a_device_that_looks_late_sees_the_newest_command_only(bus: Bus) -> None:
    for number in range(1, 4):
        await bus.publish(SetDevice(worker="trainer-a", loan_number=number, mode="train"))
    await bus.publish(SetDevice(worker="trainer-b", loan_number=9, mode="train"))
    found, _ = await bus.stored(subjects.DEVICE)
    messages = [received.message for received in found]
    assert [(m.worker, m.loan_number) for m in messages if isinstance(m, SetDevice)] == [
        ("trainer-a", 3), ("trainer-b", 9)
    ]  # fmt: skip


async def test_a_task_reaches_the_device_it_names_alone(bus: Bus) -> None:
    mine, other = examples.task(group=0), examples.task(group=1)
    await bus.publish(other.model_copy(update={"worker": "rollout-1"}))
    await bus.publish(mine)
    async with asyncio.timeout(30):
        subject = subjects.tasks_for("test", mine.worker)
        async for received in bus.follow(subjects.TASK, [subject]):
            assert received.message == mine
            break


async def test_a_follower_can_be_stopped_while_the_server_is_away(
    brokers: Brokers, start: StartProgram
) -> None:
    server = await asyncio.to_thread(start, program(brokers, "nats"))
    url = brokers.environment["DIGENRL_NATS_URL"]
    async with Bus.connect(url, run="test", name="test") as bus:
        await bus.ensure_streams()
        following = asyncio.create_task(take(bus, subjects.EVT, 1))
        await asyncio.sleep(0.5)
        server.kill()
        server.wait()
        following.cancel()
        done, _ = await asyncio.wait({following}, timeout=15)
        assert done and following.cancelled()


@contextlib.asynccontextmanager
async def schedulers(url: str, *epochs: int) -> AsyncIterator[list[Bus]]:
    """Buses of schedulers that took turns, each in its epoch; all of them still there."""
    async with contextlib.AsyncExitStack() as stack:
        found = []
        for epoch in epochs:
            bus = await stack.enter_async_context(Bus.connect(url, run="test", name="test"))
            await bus.ensure_streams()
            await bus.begin_epoch(epoch)
            found.append(bus)
        yield found


async def test_a_command_of_an_epoch_that_is_over_is_refused_by_whoever_reads_it(
    nats_url: str,
) -> None:
    async with schedulers(nats_url, 3) as [old]:
        before, late = examples.task(), examples.task(first_sample=2)
        await old.publish(before)
        async with schedulers(nats_url, 7) as [new]:
            await old.publish(late)
            after = examples.task(first_sample=4)
            await new.publish(after)
            wanted = [subjects.tasks_for("test", after.worker)]
            for filters in (None, wanted):
                stored, _ = await new.stored(subjects.TASK, filters)
                assert [each.message for each in stored] == [before, after]
            found = await take(new, subjects.TASK, 2)
            assert [each.message for each in found] == [before, after]


async def test_a_slot_that_a_refused_command_took_goes_to_who_commands_now(nats_url: str) -> None:
    async with schedulers(nats_url, 3, 7) as [old, new]:
        task = examples.task()
        assert await old.publish(task)
        assert await new.publish(task), "the one in the slot is heeded by nobody"
        assert not await new.publish(task)
        assert not await old.publish(task)
        assert [each.message for each in await take(new, subjects.TASK, 1)] == [task]


async def test_commands_before_a_takeover_and_of_earlier_releases_hold(
    nats_url: str, bus: Bus
) -> None:
    await bus.publish(examples.task())  # of a release without epochs
    async with schedulers(nats_url, 2, 5) as [_, new]:
        assert not await new.publish(examples.task())
        device = SetDevice(worker="t-1", loan_number=1, mode="train")
        await new.publish(device)
        for number in range(6, 9):  # a mark that is there already is no other one
            await new.begin_epoch(number)
            await new.begin_epoch(number)
        assert len((await new.stored(subjects.TASK))[0]) == 1
        found, _ = await new.stored(subjects.DEVICE, ["dg.test.device.t-1"])
        assert [each.message for each in found] == [device]


async def test_old_marks_are_removed(nats_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(marks, "MAX_KEPT_MARKS", 2)
    async with schedulers(nats_url, 1, 2, 3, 4) as buses:
        info = await buses[0].jetstream.stream_info(subjects.TRAIN.name)
        assert info.state.messages == 2
