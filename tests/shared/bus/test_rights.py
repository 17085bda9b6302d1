"""What each role may do on a real NATS server: exactly what the description says."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

import msgpack
import nats
import nats.errors
import pytest
from nats.aio.client import Client
from nats.js.errors import APIError

from digenrl.local.brokers.embedded import Brokers, plan_brokers
from digenrl.local.secrets.keys import Keys, load_keys
from shared.bus.bus import Bus
from shared.bus.streams import follower_config, read_message
from shared.errors import ContractError, UserError
from shared.messages import subjects
from shared.messages.codec import decode, encode
from shared.messages.contracts import OperatorRequest
from shared.messages.records import Record
from shared.messages.rights import RIGHTS, ROLES, SHARED_WORK, WORKERS, Role, inbox_subject
from shared.messages.subjects import COMMANDED, STREAMS, Stream, find_stream, message_subject
from tests.brokers import StartProgram, program

GOLDEN: dict[str, Any] = json.loads(
    (Path(__file__).parents[1] / "messages" / "golden.json").read_text()
)["messages"]
MESSAGES = {subject: decode(msgpack.packb(message)) for subject, message in GOLDEN.items()}
"""A message of each kind, by its subject."""
TRANSIENT = ("worker_status", "worker_refused")


def kind_of(message: Record) -> str:
    kind: str = message.kind  # type: ignore[attr-defined]
    return kind


def by_description(subject: str, role: Role, *, reads: bool) -> bool:
    """Whether the description lets a role publish to a subject, or read it."""
    return any(
        role in (right.readers if reads else right.publishers)
        for right in RIGHTS
        if matches(right.subject, subject)
    )


def matches(pattern: str, subject: str) -> bool:
    wanted, given = pattern.split("."), subject.split(".")
    if wanted[-1] == ">":
        wanted, given = wanted[:-1], given[: len(wanted) - 1]
    return len(wanted) == len(given) and all(
        w in ("*", g) for w, g in zip(wanted, given, strict=True)
    )


@pytest.fixture
def keys(tmp_path: Path) -> Keys:
    return load_keys(tmp_path / "brokers")


@pytest.fixture
def planned(tmp_path: Path, keys: Keys, start: StartProgram) -> Brokers:
    brokers = plan_brokers(tmp_path / "brokers", keys)
    start(program(brokers, "nats"))
    return brokers


class User:
    """A connection as one role, and what the server has refused it."""

    def __init__(self, role: Role, client: Client, refused: list[str]) -> None:
        self.role, self.client, self._refused = role, client, refused

    async def may(self, act: Callable[[Client], Awaitable[Any]]) -> bool:
        self._refused.clear()
        try:
            await act(self.client)
        except nats.errors.TimeoutError:
            assert self._refused
        except APIError:
            pass  # it was asked, and says why not
        for _ in range(3):  # a refusal may come shortly after the answer to a ping
            await self.client.flush()
            if self._refused:
                break
            await asyncio.sleep(0.005)
        return not self._refused

    async def may_publish(self, subject: str, body: bytes = b"") -> bool:
        return await self.may(lambda client: client.publish(subject, body))

    async def may_listen(self, subject: str) -> bool:
        async def listen(client: Client) -> None:
            subscription = await client.subscribe(subject)
            await client.flush()
            await subscription.unsubscribe()

        return await self.may(listen)

    async def may_read(self, stream: Stream, filters: list[str]) -> bool:
        async def read(client: Client) -> None:
            config = follower_config(client.new_inbox(), filters, 1)
            adding = asyncio.create_task(client.jetstream().add_consumer(stream.name, config))
            while not (adding.done() or self._refused):
                await asyncio.wait({adding}, timeout=0.002)
            adding.cancel()
            await asyncio.gather(adding, return_exceptions=True)

        return await self.may(read)


@pytest.fixture
async def users(planned: Brokers) -> AsyncIterator[Mapping[Role, User]]:
    found: dict[Role, User] = {}
    for role in ROLES:
        refused: list[str] = []

        async def on_error(error: Exception, refused: list[str] = refused) -> None:
            assert "permissions violation" in str(error).lower()
            refused.append(str(error))

        url = planned.secrets[role]["DIGENRL_NATS_URL"]
        client = await nats.connect(url, error_cb=on_error, inbox_prefix=inbox_subject(role))
        found[role] = User(role, client, refused)
    async with Bus.connect(
        planned.secrets["scheduler"]["DIGENRL_NATS_URL"], run="demo", name="x"
    ) as bus:
        await bus.ensure_streams()
    try:
        yield found
    finally:
        for user in found.values():
            await user.client.close()


def test_every_message_has_its_line_in_the_description() -> None:
    for subject, message in MESSAGES.items():
        [right, *others] = [
            right
            for right in RIGHTS
            if right.kind is type(message) and matches(right.subject, subject)
        ]
        assert not others, subject
        if right.stream is not None:
            assert right.stream is find_stream(subject)
    assert {right.kind for right in RIGHTS} == {type(message) for message in MESSAGES.values()}


def test_nobody_but_the_scheduler_commands_and_nobody_but_it_and_the_trainer_announces() -> None:
    assert all(
        right.publishers == ("scheduler",)
        for right in RIGHTS
        if right.stream in COMMANDED and ".fluid." not in right.subject
    )
    by = {right.kind.__name__: right.publishers for right in RIGHTS}
    assert by["Stepped"] == ("trainer",)
    assert by["PolicyPublished"] == ("scheduler", "trainer")
    assert by["TakeStep"] == by["CommitVersion"] == by["OperatorRequest"] == ("scheduler",)


async def test_each_role_publishes_what_the_description_says_and_nothing_else(
    users: Mapping[Role, User],
) -> None:
    for role, user in users.items():
        for subject, message in MESSAGES.items():
            allowed = by_description(subject, role, reads=False)
            assert await user.may_publish(subject, encode(message)) == allowed, (role, subject)


async def test_each_role_reads_what_the_description_says_and_nothing_else(
    users: Mapping[Role, User],
) -> None:
    for role, user in users.items():
        for subject, message in MESSAGES.items():
            if kind_of(message) in TRANSIENT:
                allowed = role == "scheduler" or by_description(subject, role, reads=True)
                if kind_of(message) == "worker_refused":
                    allowed = role in WORKERS
                assert await user.may_listen(subject) == allowed, (role, subject)
                continue
            stream = find_stream(subject)
            allowed = role == "scheduler" or by_description(subject, role, reads=True)
            assert await user.may_read(stream, [subject]) == allowed, (role, subject)
        for stream in STREAMS:
            kinds = {right.subject for right in RIGHTS
                     if right.stream is stream and role in right.readers}  # fmt: skip
            whole = len(kinds) > 1 or (bool(kinds) and stream in COMMANDED)
            filters = ["dg.demo.x", "dg.demo.y"]
            allowed = role == "scheduler" or whole
            assert await user.may_read(stream, filters) == allowed, (role, stream.name)


MANAGEMENT = {
    "$JS.API.STREAM.CREATE.DG_OTHER": {"scheduler"},
    "$JS.API.STREAM.UPDATE.DG_TRAJ": {"scheduler"},
    "$JS.API.STREAM.PURGE.DG_TRAJ": {"scheduler"},
    "$JS.API.STREAM.MSG.DELETE.DG_TASK": {"scheduler"},
    "$JS.API.STREAM.DELETE.DG_TRAJ": set(),
    "$JS.API.STREAM.SNAPSHOT.DG_TRAJ": set(),
    "$JS.API.STREAM.RESTORE.DG_TRAJ": set(),
    "$JS.API.STREAM.INFO.DG_TRAJ": set(ROLES),
    "$JS.API.CONSUMER.MSG.NEXT.DG_TRAJ.reward-demo": {"reward"},
    "$JS.API.CONSUMER.DELETE.DG_TRAJ.reward-demo": {"scheduler"},
    "$JS.API.CONSUMER.DURABLE.CREATE.DG_TRAJ.mine": set(),
    "$JS.ACK.DG_TRAJ.reward-demo.1.1.1.1.0": {"reward"},
    "$JS.ACK.DG_TASK.other.1.1.1.1.0": set(),
    "$JS.API.STREAM.MSG.GET.DG_REW": {"scheduler", "reward"},
    "$KV.lease.scheduler": {"scheduler"},
    "dg.demo.task.epoch.9": {"scheduler"},
    "$SYS.REQ.SERVER.PING": set(),
    # The rest of JetStream's own operations.
    "$JS.API.INFO": {"scheduler"},
    "$JS.API.STREAM.NAMES": set(),
    "$JS.API.STREAM.LIST": {"scheduler"},
    "$JS.API.STREAM.PEER.REMOVE.DG_TRAJ": set(),
    "$JS.API.STREAM.LEADER.STEPDOWN.DG_TRAJ": set(),
    "$JS.API.CONSUMER.LIST.DG_TRAJ": set(),
    "$JS.API.CONSUMER.NAMES.DG_TRAJ": set(),
    "$JS.API.CONSUMER.INFO.DG_TRAJ.reward-demo": {"reward"},
    "$JS.API.CONSUMER.INFO.DG_TASK.x": set(),
    "$JS.API.CONSUMER.PAUSE.DG_TRAJ.reward-demo": set(),
    "$JS.API.CONSUMER.RESET.DG_TRAJ.reward-demo": set(),
    "$JS.API.CONSUMER.UNPIN.DG_TRAJ.reward-demo": set(),
    "$JS.API.CONSUMER.LEADER.STEPDOWN.DG_TRAJ.reward-demo": set(),
    "$JS.API.META.LEADER.STEPDOWN": set(),
    "$JS.API.SERVER.REMOVE": set(),
    "$JS.API.ACCOUNT.PURGE.A": set(),
    "$JS.API.ACCOUNT.STREAM.MOVE.A.DG_TRAJ": set(),
    "$JS.API.DIRECT.GET.KV_lease": {"scheduler"},
    "$JS.FC.DG_TRAJ.x": set(),
    "$KV.other.key": {"scheduler"},
    "anything": set(),
}


async def test_only_the_scheduler_makes_and_empties_streams_and_nobody_deletes_them(
    users: Mapping[Role, User],
) -> None:
    for subject, allowed in MANAGEMENT.items():
        may = {role for role, user in users.items() if await user.may_publish(subject)}
        assert may == allowed, subject
    for role, user in users.items():
        others = [inbox_subject(each) for each in ROLES if each != role]
        for subject in (*(f"{each}.>" for each in others), "_INBOX.>", ">", "$SYS.>", "dg.>"):
            assert not await user.may_listen(subject), (role, subject)


async def test_nobody_comes_in_without_the_secret_of_a_role(planned: Brokers, keys: Keys) -> None:
    at = f"127.0.0.1:{planned.nats_port}"
    for login in ("", "digenrl:digenrl-local@", "trainer:wrong@",
                  f"scheduler:{keys.secret('rollout')}@"):  # fmt: skip
        with pytest.raises(UserError, match="refuses this user or password"):
            async with Bus.connect(f"nats://{login}{at}", run="demo", name="x"):
                pass


@pytest.mark.usefixtures("users")
async def test_a_message_under_the_subject_of_another_is_quarantined(planned: Brokers) -> None:
    """Who may publish a failure may not stop the run in its place."""
    forged = encode(OperatorRequest(action="stop", id="x"))
    urls = {role: planned.secrets[role]["DIGENRL_NATS_URL"] for role in ROLES}
    async with Bus.connect(urls["rollout"], run="demo", name="a") as rollout:
        await rollout.jetstream.publish("dg.demo.evt.fragment_failed.rollout", forged)
        async with Bus.connect(urls["scheduler"], run="demo", name="b") as scheduler:
            [received], _ = await scheduler.stored(subjects.EVT)
            assert received.message is None and received.data == forged
            [kept], _ = await scheduler.stored(subjects.DLQ)
            assert kept.subject.startswith("dg.demo.quarantine.DG_EVT.")


def test_every_message_comes_under_its_own_subject() -> None:
    class Raw:
        def __init__(self, subject: str, data: bytes) -> None:
            self.subject, self.data, self.headers = subject, data, None

    for subject, message in MESSAGES.items():
        run = subject.split(".")[1]
        raw: Any = Raw(message_subject(run, message), encode(message))
        assert read_message(run, raw) == message
        with pytest.raises(ContractError, match="which is not its subject"):
            read_message("other", raw)


def test_work_that_is_shared_is_read_by_those_who_share_it() -> None:
    for role, stream in SHARED_WORK.items():
        assert any(right.stream is stream and role in right.readers for right in RIGHTS)
