"""The NATS server in memory answers as the real one does: the same assertions run on both.

What the one in memory does not model is listed in `nats_server.py`.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from typing import Any

import nats
import pytest
from nats.aio.client import Client
from nats.aio.msg import Msg

from digenrl.local.brokers.embedded import Brokers
from shared.bus.streams import follower_config, stream_config
from shared.messages.subjects import ALL_SUBJECTS, DLQ, TASK
from tests.brokers import program
from tests.world.nats_server import NatsServer
from tests.world.nats_transport import Network, installed

HERE = "127.0.0.1"


@dataclass
class Broker:
    """Either server, with what starts and kills it."""

    url: str
    kill: Callable[[], Any]
    start: Callable[[], Any]


def in_memory(brokers: Brokers, network: Network) -> NatsServer:
    """Put a server with the same configuration into the network."""
    config = program(brokers, "nats").config
    assert config is not None
    server = NatsServer(config.read_text())
    network.servers[HERE, brokers.nats_port] = server
    return server


@pytest.fixture(params=["memory", pytest.param("real", marks=pytest.mark.broker)])
def broker(request: pytest.FixtureRequest) -> Iterator[Broker]:
    brokers = request.getfixturevalue("brokers")
    url = brokers.environment["DIGENRL_NATS_URL"]
    if request.param == "memory":
        server = in_memory(brokers, network := Network())
        server.start()
        with installed(network):
            yield Broker(url, server.kill, server.start)
        return
    start, running = request.getfixturevalue("start"), list[Any]()

    def begin() -> None:
        running.append(start(program(brokers, "nats")))

    def kill() -> None:
        running[-1].kill()
        running[-1].wait()

    begin()
    yield Broker(url, kill, lambda: asyncio.to_thread(begin))


@pytest.fixture
async def client(broker: Broker) -> AsyncIterator[Client]:
    client = await nats.connect(broker.url, reconnect_time_wait=0.05, max_reconnect_attempts=-1)
    yield client
    await client.close()


def error(code: int, err_code: int, description: str) -> dict[str, Any]:
    return {"error": {"code": code, "err_code": err_code, "description": description}}


TASKS = {key: each for key, each in stream_config(TASK).as_dict().items() if key != "no_ack"}
KV = dict(
    name="KV_L", subjects=["$KV.L.>"], storage="file", retention="limits", discard="new",
    max_bytes=1 << 20, max_msgs_per_subject=1, max_age=500_000_000, duplicate_window=500_000_000,
    allow_rollup_hdrs=True, deny_delete=True,
)  # fmt: skip
SMALL = dict(name="S", subjects=["s.>"], storage="file", retention="limits", max_bytes=200)
GONE = error(404, 10059, "stream not found")
NO_ROOM = error(500, 10047, "insufficient storage resources available")
TAKEN = error(503, 10077, "maximum messages per subject exceeded")
OTHER = error(400, 10058, "stream name already in use with a different configuration")
SLOT, NEWEST = "dg.r.task.a.1.0.0.", "Nats-Expected-Last-Subject-Sequence"
DONE, NOBODY = {"success": True}, error(404, 10014, "consumer not found")
NO_MESSAGE = error(404, 10037, "no message found")


def api(call: str, answer: dict[str, Any], body: Any = None) -> tuple[str, Any, Any, Any]:
    return f"$JS.API.{call}", body, None, answer


def wrong_last(seq: int) -> dict[str, Any]:
    return error(400, 10071, f"wrong last sequence: {seq}")


def worker(name: str) -> dict[str, Any]:
    config = {"name": name, "durable_name": name, "ack_policy": "explicit"}
    return {"stream_name": "S", "config": config}


def stored(seq: int, **more: Any) -> dict[str, Any]:
    return {"stream": TASK.name, "seq": seq, **more}


ANSWERS: tuple[tuple[str, Any, dict[str, str] | None, dict[str, Any]], ...] = (
    (SLOT + "0", "hello", None, {"status": "503"}),
    api("STREAM.INFO.DG_TASK", GONE),
    api("STREAM.LIST", {"total": 0, "streams": []}, {"subject": ALL_SUBJECTS}),
    api("STREAM.UPDATE.DG_TASK", GONE, TASKS),
    api("STREAM.PURGE.DG_TASK", GONE, {}),
    api("STREAM.MSG.GET.DG_TASK", GONE, {"seq": 1}),
    api("STREAM.MSG.DELETE.DG_TASK", GONE, {"seq": 1}),
    api("CONSUMER.INFO.DG_TASK.x", GONE),
    api("CONSUMER.MSG.NEXT.DG_TASK.x", {"status": "503"}, {"batch": 1}),
    api("STREAM.CREATE.DG_TASK", {"did_create": True, "config": TASKS, "state": {"last_seq": 0}},
        TASKS),
    api("STREAM.CREATE.DG_TASK", {"did_create": True}, TASKS),
    api("STREAM.CREATE.DG_TASK", OTHER, {**TASKS, "max_bytes": 9}),
    api("STREAM.CREATE.X", NO_ROOM, {**SMALL, "name": "X", "max_bytes": 2 << 30}),
    api("STREAM.UPDATE.DG_TASK", NO_ROOM, {**TASKS, "max_bytes": 2 << 30}),
    api("STREAM.UPDATE.DG_TASK", {"config": {"max_bytes": 128 << 20}},
        {**TASKS, "max_bytes": 128 << 20}),
    (SLOT + "0", "hello", None, stored(1)),
    (SLOT + "0", "hello", None, {**TAKEN, **stored(0)}),
    (SLOT + "1", "hello", {"Nats-Msg-Id": "a"}, stored(2)),
    (SLOT + "2", "hello", {"Nats-Msg-Id": "a"}, stored(2, duplicate=True)),
    (SLOT + "0", "hello", {"Nats-Msg-Id": "a"}, stored(2, duplicate=True)),
    (SLOT + "0", "hello", {"Nats-Msg-Id": "b"}, TAKEN),
    (SLOT + "0", "x", {"Nats-Msg-Id": "a", NEWEST: "0"}, wrong_last(1)),
    (SLOT + "3", "x" * 69633, None, error(400, 10054, "message size exceeds maximum allowed")),
    (SLOT + "4", "x", {NEWEST: "3"}, wrong_last(0)),
    api("STREAM.INFO.DG_TASK", {"state": {
        "messages": 2, "bytes": 140, "first_seq": 1, "last_seq": 2, "num_subjects": 2}}),
    api("STREAM.MSG.GET.DG_TASK", {"message": {
        "subject": SLOT + "1", "seq": 2, "data": "aGVsbG8=",
        "hdrs": "TkFUUy8xLjANCk5hdHMtTXNnLUlkOiBhDQoNCg=="}}, {"seq": 2}),
    api("STREAM.MSG.GET.DG_TASK", NO_MESSAGE, {"seq": 9}),
    api("STREAM.MSG.GET.DG_TASK", {"message": {"seq": 1}}, {"last_by_subj": SLOT + "0"}),
    api("STREAM.MSG.GET.DG_TASK", NO_MESSAGE, {"last_by_subj": "q"}),
    api("STREAM.MSG.DELETE.DG_TASK", DONE, {"seq": 2}),
    api("STREAM.MSG.DELETE.DG_TASK", error(400, 10043, "sequence 2 not found"), {"seq": 2}),
    (SLOT + "1", "again", None, stored(3)),
    api("STREAM.PURGE.DG_TASK", {**DONE, "purged": 1}, {"filter": "dg.*.task.a.1.>", "keep": 1}),
    api("STREAM.PURGE.DG_TASK", {**DONE, "purged": 1}, {"filter": "dg.*.task.a.1.>"}),
    api("STREAM.INFO.DG_TASK", {"state": {"messages": 0, "first_seq": 4, "last_seq": 3}}),
    (SLOT + "1", "again", None, stored(4)),
    api("STREAM.PURGE.DG_TASK", {**DONE, "purged": 1}),
    api("CONSUMER.INFO.DG_TASK.x", NOBODY),
    api("CONSUMER.DELETE.DG_TASK.x", NOBODY),
    api("STREAM.CREATE.S", {"did_create": True}, {**SMALL, "discard": "new", "max_consumers": 1}),
    api("CONSUMER.CREATE.S.x", {"num_pending": 0}, worker("x")),
    api("CONSUMER.CREATE.S.y", error(400, 10026, "maximum consumers limit reached"), worker("y")),
    ("s.0", "x" * 40, None, {"seq": 1}),
    ("s.0", "x" * 40, None, {"seq": 2}),
    ("s.0", "x" * 40, None, error(503, 10077, "maximum bytes exceeded")),
    api("STREAM.CREATE.T", {"did_create": True},
        {**SMALL, "name": "T", "subjects": ["t.>"], "discard": "old"}),
    *[("t.0", "x" * 40, None, {"seq": seq}) for seq in (1, 2, 3)],
    api("STREAM.INFO.T", {"state": {"messages": 2, "bytes": 146, "first_seq": 2}}),
    ("t.0", "x" * 400, None, {"seq": 4}),
    api("STREAM.INFO.T", {"state": {"messages": 0, "first_seq": 5, "last_seq": 4}}),
    api("STREAM.LIST", {"total": 1, "offset": 0, "streams": [
        {"config": {"name": "DG_TASK", "max_bytes": 128 << 20}, "state": {"last_seq": 4}}]},
        {"subject": ALL_SUBJECTS}),
    api("STREAM.CREATE.KV_L", {"config": KV}, KV),
    *[("$KV.L.k", "v", {NEWEST: on}, {"seq": seq}) for on, seq in (("0", 1), ("1", 2))],
    ("$KV.L.k", "v", {NEWEST: "1"}, wrong_last(2)),
    ("sleep", 0.9, None, {}),
    ("$KV.L.k", "v", {NEWEST: "2"}, wrong_last(0)),
    ("$KV.L.k", "v", {NEWEST: "0"}, {"seq": 3}),
)  # fmt: skip


def lacks(found: Any, wanted: Any) -> bool:
    """Whether something of what is wanted is missing or other."""
    if isinstance(wanted, dict):
        return any(key not in found or lacks(found[key], wanted[key]) for key in wanted)
    if isinstance(wanted, list) and isinstance(found, list) and len(found) == len(wanted):
        return any(map(lacks, found, wanted))
    return bool(found != wanted)


async def ask(client: Client, subject: str, body: Any, headers: Any = None) -> Any:
    data = body if isinstance(body, str) else "" if body is None else json.dumps(body)
    answers = await client.subscribe(inbox := client.new_inbox())
    await client.publish(subject, data.encode(), reply=inbox, headers=headers)
    found = await answers.next_msg(timeout=5)
    await answers.unsubscribe()
    return {"status": found.headers["Status"]} if found.headers else json.loads(found.data or b"{}")


async def test_requests_and_publishers_get_the_same_answers(client: Client) -> None:
    for number, (subject, body, headers, wanted) in enumerate(ANSWERS):
        if subject == "sleep":
            await asyncio.sleep(body)
            continue
        found = await ask(client, subject, body, headers)
        assert not lacks(found, wanted), (number, subject, body, found)


async def about(client: Client, consumer: str) -> Any:
    return await ask(client, f"$JS.API.CONSUMER.INFO.{TASK.name}.{consumer}", None)


async def pushed(client: Client, filters: list[str], start: int, **more: Any) -> Any:
    inbox = client.new_inbox()
    reading = await client.subscribe(inbox)
    config = follower_config(inbox, filters, start).evolve(idle_heartbeat=0.3, **more)
    return reading, await client.jetstream().add_consumer(TASK.name, config)


async def working(client: Client, **more: Any) -> Any:
    """Make the consumer of shared work, and return what asks it for messages."""
    config = dict(
        name="q", durable_name="q", ack_policy="explicit", ack_wait=600_000_000, max_deliver=2,
        deliver_policy="all", replay_policy="instant", filter_subject="dg.r.task.>",
    )  # fmt: skip
    request = {"stream_name": TASK.name, "config": {**config, **more}}
    await ask(client, f"$JS.API.CONSUMER.CREATE.{TASK.name}.q.dg.r.task.>", request)
    inbox = client.new_inbox()
    reading = await client.subscribe(inbox)

    async def next_of(answers: int = 1, seconds: float = 0.2, **request: Any) -> list[Msg]:
        body = json.dumps({"batch": 1, "expires": int(seconds * 1e9), **request}).encode()
        await client.publish(f"$JS.API.CONSUMER.MSG.NEXT.{TASK.name}.q", body, reply=inbox)
        return [await reading.next_msg(timeout=3) for _ in range(answers)]

    return next_of


def shown(raw: Msg) -> Any:
    """Attempt, number in the stream and in the consumer, and how many are left; or the status."""
    if raw.headers and "Status" in raw.headers:
        names = ("Status", "Description", "Nats-Pending-Messages")
        return " ".join(raw.headers[name] for name in names if name in raw.headers)
    words = raw.reply.split(".")
    return *map(int, words[4:7]), int(words[8])


async def fill(client: Client, count: int) -> None:
    for stream in (TASK, DLQ):
        await client.jetstream().add_stream(stream_config(stream))
    for number in range(count):
        named = {"Nats-Msg-Id": str(number)}
        await client.jetstream().publish(f"{SLOT}{number}", b"hello", headers=named)


async def test_a_pushed_consumer_gets_what_its_filter_lets_through(client: Client) -> None:
    await fill(client, 4)
    several = [f"{SLOT}1", f"{SLOT}3"]
    for filters, start, wanted in (
        (["dg.r.task.>"], 1, [(1, 1, 1, 3), (1, 2, 2, 2), (1, 3, 3, 1), (1, 4, 4, 0)]),
        (several, 3, [(1, 4, 1, 0)]),
        (several, 99, []),
        (["dg.other.>"], 1, []),
    ):
        reading, info = await pushed(client, filters, start)
        assert info.num_pending == len(wanted)
        assert [shown(await reading.next_msg()) for _ in wanted] == wanted
        beat = await reading.next_msg()
        assert shown(beat) == "100 Idle Heartbeat"
        assert beat.headers["Nats-Last-Consumer"] == str(len(wanted))
        assert beat.headers["Nats-Last-Stream"] == str(max(4, start - 1))
    reading, _ = await pushed(client, ["dg.r.task.>"], 5)
    await client.jetstream().publish(f"{SLOT}9", b"later")
    assert shown(await reading.next_msg()) == (1, 5, 1, 0)


async def test_a_pushed_consumer_to_which_nobody_listens_leaves(client: Client) -> None:
    await fill(client, 0)
    reading, info = await pushed(client, ["dg.r.task.>"], 1, inactive_threshold=0.3)
    await asyncio.sleep(0.5)
    assert not lacks(await about(client, info.name), {"name": info.name})
    await reading.unsubscribe()
    await asyncio.sleep(0.5)
    assert not lacks(await about(client, info.name), NOBODY)


async def test_shared_work_goes_to_one_and_comes_again(client: Client) -> None:
    await fill(client, 3)
    next_of = await working(client)
    first, second, third, *end = await next_of(4, batch=9, no_wait=True, expires=0)
    assert [shown(each) for each in (first, second, third)] == [
        (1, 1, 1, 2), (1, 2, 2, 1), (1, 3, 3, 0)]  # fmt: skip
    assert [shown(each) for each in end] == ["404 No Messages"]
    await third.ack()
    await second.nak(delay=0.1)
    [back] = await next_of()
    assert shown(back) == (2, 2, 4, 0)
    await back.term()
    await asyncio.sleep(0.3)
    await first.in_progress()
    assert [shown(each) for each in await next_of(seconds=0.4)] == ["408 Request Timeout 1"]
    [late] = await next_of(seconds=2)
    assert shown(late) == (2, 1, 5, 0)
    await late.nak()
    state = client.jetstream().stream_info
    assert (await state(DLQ.name)).state.messages == 0, "said when somebody asks"
    assert [shown(each) for each in await next_of()] == ["408 Request Timeout 1"]
    kept = await client.jetstream().get_msg(DLQ.name, 1)
    assert kept.subject == f"$JS.EVENT.ADVISORY.CONSUMER.MAX_DELIVERIES.{TASK.name}.q"
    said = {"stream": TASK.name, "consumer": "q", "stream_seq": 1, "deliveries": 2}
    assert not lacks(json.loads(kept.data), said)


async def test_what_is_purged_is_not_delivered_again(client: Client) -> None:
    await fill(client, 2)
    next_of = await working(client, ack_wait=200_000_000)
    await next_of()
    await client.jetstream().purge_stream(TASK.name)
    assert [shown(each) for each in await next_of(seconds=0.5)] == ["408 Request Timeout 1"]
    assert not lacks(await about(client, "q"), {"num_pending": 0, "num_ack_pending": 0})


async def test_those_who_ask_take_turns_and_hear_of_the_end(client: Client) -> None:
    await fill(client, 0)
    one, other = await working(client), await working(client)
    asking = [asyncio.create_task(each(2 - n, 9, batch=9)) for n, each in enumerate((one, other))]
    await asyncio.sleep(0.1)
    for name in range(3):
        await client.jetstream().publish(f"{SLOT}{name}", b"")
    numbers = [[each.metadata.sequence.stream for each in await task] for task in asking]
    assert numbers == [[1, 3], [2]]
    await client.jetstream().delete_consumer(TASK.name, "q")
    gone = await ask(client, f"$JS.API.CONSUMER.MSG.NEXT.{TASK.name}.q", {"batch": 1})
    assert gone == {"status": "503"}


async def test_what_is_left_when_the_server_is_killed(broker: Broker, client: Client) -> None:
    await fill(client, 2)
    next_of = await working(client, ack_wait=500_000_000)
    await (await next_of())[0].ack()
    await next_of()
    await asyncio.sleep(0.3)  # its state is written ten times a second
    _, memory = await pushed(client, ["dg.r.task.>"], 1)
    before = (await client.jetstream().stream_info(TASK.name)).created
    broker.kill()
    await asyncio.sleep(0.1)
    started = broker.start()
    if started is not None:
        await started
    async with asyncio.timeout(10):
        while not client.is_connected:  # noqa: ASYNC110
            await asyncio.sleep(0.02)
    info = await client.jetstream().stream_info(TASK.name)
    assert (info.created, info.state.last_seq) == (before, 2)
    again = await client.jetstream().publish(f"{SLOT}7", b"", headers={"Nats-Msg-Id": "1"})
    assert again.duplicate
    assert not lacks(await about(client, memory.name), NOBODY)
    assert [shown(each) for each in await next_of(seconds=2)] == [(2, 2, 3, 0)]


async def test_plain_messages_reach_those_who_listen(client: Client) -> None:
    found = {word: await client.subscribe(word) for word in ("a.b", "a.*", "a.>", "*.b", "a.c")}
    await found["a.*"].unsubscribe(limit=1)
    for body in (b"1", b"2"):
        await client.publish("a.b", body)
    await client.flush()
    wanted, got = {"a.b": 2, "a.*": 1, "a.>": 2, "*.b": 2, "a.c": 0}, dict[str, int]()
    async with asyncio.timeout(5):
        while got != wanted:
            await asyncio.sleep(0.01)
            got = {word: each.pending_msgs for word, each in found.items()}
