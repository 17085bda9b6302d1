"""Buckets over slow and dead lines, and how requests to them are signed."""

import asyncio
import contextlib
import json
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

import pytest
from pydantic import SecretStr

from digenrl.local.brokers.embedded import BUCKET, USER
from shared.errors import Unavailable
from shared.process.settings import ServiceSettings
from shared.store import ObjectStore, StoreSettings, bucket, open_store
from tests.brokers import PASSWORD

Handle = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]

SILENCE_S = 2.5
BYTES_PER_S = 8 << 20
MIB = 1 << 20
LARGE = 3 * BYTES_PER_S
"""Bytes; a part of it takes half of the silence that is allowed."""


@contextlib.asynccontextmanager
async def listening(handle: Handle) -> AsyncIterator[str]:
    """The address of a server that does this with each connection."""
    connections: set[asyncio.Task[None]] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        connections.add(task)
        over = (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError)
        with contextlib.closing(writer), contextlib.suppress(*over):
            await handle(reader, writer)

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()
        for task in connections:
            task.cancel()
        await asyncio.gather(*connections, return_exceptions=True)


async def carry(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, line: asyncio.Lock | None = None
) -> None:
    while piece := await reader.read(BYTES_PER_S // 32):
        if line is not None:
            async with line:
                await asyncio.sleep(len(piece) / BYTES_PER_S)
        writer.write(piece)
        await writer.drain()


def a_slow_line_to(port: int) -> Handle:
    """Slow in the direction of the store, however many connections share it."""
    line = asyncio.Lock()

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        up_reader, up_writer = await asyncio.open_connection("127.0.0.1", port)
        with contextlib.closing(up_writer):
            await asyncio.gather(carry(reader, up_writer, line), carry(up_reader, writer))

    return handle


def through(endpoint: str) -> ObjectStore:
    return open_store(
        StoreSettings(
            url=f"s3://{BUCKET}/slow",
            endpoint=endpoint,
            access_key=SecretStr(USER),
            secret_key=SecretStr(PASSWORD),
        )
    )


@pytest.mark.broker
def test_an_object_may_take_longer_than_any_silence_is_allowed_to(
    s3_store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is sent in parts, each a request of its own."""
    endpoint = ServiceSettings(run="test").s3_endpoint
    assert endpoint is not None
    monkeypatch.setattr(bucket, "MAX_SILENCE", timedelta(seconds=SILENCE_S))
    data = bytes(range(256)) * (LARGE // 256)

    async def there_and_back() -> None:
        async with listening(a_slow_line_to(int(endpoint.rsplit(":", 1)[1]))) as slow:
            began = asyncio.get_running_loop().time()
            ref = await through(slow).put("weights", data, suffix=".safetensors")
            assert asyncio.get_running_loop().time() - began > SILENCE_S
            assert await through(slow).get(ref) == data

    asyncio.run(there_and_back())


@pytest.mark.broker
def test_after_a_failure_a_part_may_be_silent_twice_as_long(
    s3_store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that a line on which a part takes longer than the usual silence stores it in the end."""
    endpoint = ServiceSettings(run="test").s3_endpoint
    assert endpoint is not None
    part_s = bucket.PART / BYTES_PER_S
    monkeypatch.setattr(bucket, "MAX_SILENCE", timedelta(seconds=part_s / 2))
    monkeypatch.setattr(bucket, "MAX_PART_RETRY_TIME", timedelta(0))
    monkeypatch.setattr(bucket, "UNKNOWN_PART_TIME", timedelta(0))

    async def there() -> int:
        async with listening(a_slow_line_to(int(endpoint.rsplit(":", 1)[1]))) as slow:
            store = through(slow)
            for failures in range(6):
                with contextlib.suppress(Unavailable):
                    await store.put("weights", bytes(bucket.PART + 1), suffix=".bin")
                    return failures
        return 6

    assert 0 < asyncio.run(there()) < 6


@dataclass
class Starvation:
    """A relay to the store that counts what it reads. After each of ``after`` bytes the connection
    that has brought them starves: nothing more of it is read."""

    port: int
    after: list[int]
    num_bytes: int = 0

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        up_reader, up_writer = await asyncio.open_connection("127.0.0.1", self.port)
        with contextlib.closing(up_writer):
            await asyncio.gather(self._send(reader, up_writer), carry(up_reader, writer))

    async def _send(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while piece := await reader.read(1 << 16):
            self.num_bytes += len(piece)
            if self.after and self.num_bytes >= self.after[0]:
                self.after.pop(0)
                await asyncio.Event().wait()
            writer.write(piece)
            await writer.drain()


@dataclass
class BreakingLine:
    """A relay to the store that counts what it gives. After each of ``after`` bytes it ends the
    connection that has them."""

    port: int
    after: list[int]
    num_bytes: int = 0

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        up_reader, up_writer = await asyncio.open_connection("127.0.0.1", self.port)
        with contextlib.closing(up_writer):
            sending = asyncio.create_task(carry(reader, up_writer))
            while piece := await up_reader.read(1 << 16):
                self.num_bytes += len(piece)
                if self.after and self.num_bytes >= self.after[0]:
                    self.after.pop(0)
                    break
                writer.write(piece)
                await writer.drain()
            sending.cancel()


@pytest.mark.broker
def test_a_read_continues_where_it_was_however_long_it_takes(
    s3_store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client itself begins no further attempt."""
    endpoint = ServiceSettings(run="test").s3_endpoint
    assert endpoint is not None
    monkeypatch.setattr(bucket, "MAX_RETRY_TIME", timedelta(0))
    data = bytes(range(256)) * (16 * MIB // 256)
    line = BreakingLine(int(endpoint.rsplit(":", 1)[1]), [2 * MIB, 8 * MIB, 12 * MIB])

    async def there_and_back() -> None:
        ref = await through(endpoint).put("weights", data, suffix=".safetensors")
        async with listening(line.handle) as breaking:
            assert await through(breaking).get(ref) == data
            assert line.after == []
            assert line.num_bytes < len(data) + 3 * 1.5 * MIB
            line.after = [line.num_bytes]
            with pytest.raises(Unavailable):
                await through(breaking).get(ref)

    asyncio.run(there_and_back())


@pytest.mark.broker
@pytest.mark.parametrize("after", [[2], [2, 4], [1, 2, 3, 4]])
def test_a_part_that_starves_is_sent_again_alone(
    s3_store: ObjectStore, monkeypatch: pytest.MonkeyPatch, after: list[int]
) -> None:
    """Its connection is silent for as long as is allowed, and the other parts are there."""
    endpoint = ServiceSettings(run="test").s3_endpoint
    assert endpoint is not None
    monkeypatch.setattr(bucket, "MAX_SILENCE", timedelta(seconds=SILENCE_S))
    monkeypatch.setattr(bucket, "MAX_RETRY_TIME", timedelta(seconds=SILENCE_S))
    monkeypatch.setattr(bucket, "UNKNOWN_PART_TIME", timedelta(0))
    data = bytes(range(256)) * (6 * bucket.PART // 256)
    relay = Starvation(int(endpoint.rsplit(":", 1)[1]), [each * bucket.PART for each in after])

    async def there_and_back() -> None:
        async with listening(relay.handle) as starved:
            ref = await through(starved).put("weights", data, suffix=".safetensors")
            assert relay.after == []
            assert relay.num_bytes < len(data) + (len(after) + 0.5) * bucket.PART
            assert await through(endpoint).get(ref) == data

    asyncio.run(there_and_back())


@pytest.mark.broker
@pytest.mark.slow
def test_a_starving_part_that_ends_the_whole_transfer_is_caught(
    s3_store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bucket, "MAX_PART_RETRY_TIME", timedelta(0))
    with pytest.raises(Unavailable):
        test_a_part_that_starves_is_sent_again_alone(s3_store, monkeypatch, [2])


async def test_a_server_that_says_nothing_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bucket, "MAX_SILENCE", timedelta(seconds=0.3))
    monkeypatch.setattr(bucket, "MAX_RETRY_TIME", timedelta(seconds=0.3))

    async def says_nothing(reader: asyncio.StreamReader, _: asyncio.StreamWriter) -> None:
        await reader.read()

    async with listening(says_nothing) as silent, asyncio.timeout(10):
        with pytest.raises(Unavailable):
            await through(silent).write("key", b"data")
        with pytest.raises(Unavailable):
            await through(silent).read("key")


async def test_a_store_without_the_bucket_is_one_that_does_not_answer() -> None:
    async def knows_no_bucket(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while await reader.readuntil(b"\r\n\r\ndata"):
            writer.write(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n")

    async with listening(knows_no_bucket) as endpoint:
        for write in (through(endpoint).write, through(endpoint).create):
            with pytest.raises(Unavailable, match="did not answer as it should"):
                await write("key", b"data")


@dataclass
class Recorder:
    """Answers that what is created first is new, and what follows is there already."""

    requests: list[str] = field(default_factory=list)

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
            length = re.search(r"content-length: (\d+)", head)
            await reader.readexactly(int(length[1]) if length else 0)
            self.requests.append(head)
            status = "200 OK" if len(self.requests) == 1 else "412 Precondition Failed"
            writer.write(f'HTTP/1.1 {status}\r\nETag: "x"\r\nContent-Length: 0\r\n\r\n'.encode())


@pytest.fixture
def cloud(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """An environment as the clouds' own tools read it."""
    monkeypatch.setenv("AWS_REGION", "eu-central-1")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "the-clouds-key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "the-clouds-secret")
    monkeypatch.setenv("AWS_SESSION_TOKEN", "the-clouds-token")
    return monkeypatch


async def test_amazons_own_variables_name_region_and_temporary_credentials(
    cloud: pytest.MonkeyPatch,
) -> None:
    recorder = Recorder()
    async with listening(recorder) as endpoint:
        await open_store(StoreSettings(url="s3://bucket", endpoint=endpoint)).create("a", b"1")
    [request] = recorder.requests
    assert "credential=the-clouds-key/" in request and "/eu-central-1/s3/" in request
    assert "x-amz-security-token: the-clouds-token" in request


@pytest.mark.parametrize("token", [None, "mine"])
async def test_keys_that_are_set_for_the_run_go_with_its_own_token_only(
    cloud: pytest.MonkeyPatch, token: str | None
) -> None:
    recorder = Recorder()
    async with listening(recorder) as endpoint:
        settings = StoreSettings(
            url="s3://bucket",
            endpoint=endpoint,
            access_key=SecretStr("my-key"),
            secret_key=SecretStr("my-secret"),
            session_token=None if token is None else SecretStr(token),
        )
        await open_store(settings).create("a", b"1")
    [request] = recorder.requests
    assert "credential=my-key/" in request
    sent = re.findall(r"x-amz-security-token: (\S+)", request)
    assert sent == ([] if token is None else [token])


CONDITIONS = {
    "s3": "if-none-match: *",
    "az": "if-none-match: *",
    "gs": "x-goog-if-generation-match: 0",
}


@pytest.mark.parametrize("kind", CONDITIONS)
async def test_a_record_is_created_once_in_every_kind_of_bucket(
    cloud: pytest.MonkeyPatch, tmp_path: Path, kind: str
) -> None:
    recorder = Recorder()
    async with listening(recorder) as endpoint:
        account = tmp_path / "account.json"
        account.write_text(json.dumps({
            "gcs_base_url": endpoint, "disable_oauth": True,
            "client_email": "", "private_key": "", "private_key_id": "",
        }))  # fmt: skip
        cloud.setenv("GOOGLE_SERVICE_ACCOUNT", str(account))
        cloud.setenv("AZURE_STORAGE_ACCOUNT_NAME", "account")
        cloud.setenv("AZURE_STORAGE_ACCOUNT_KEY", "c2VjcmV0")
        cloud.setenv("AZURE_STORAGE_ENDPOINT", endpoint)
        store = open_store(StoreSettings(url=f"{kind}://bucket/runs", endpoint=endpoint))
        assert await store.create("commits/0.json", b"mine")
        assert not await store.create("commits/0.json", b"another's")
    assert len(recorder.requests) == 2
    assert all(CONDITIONS[kind] in request for request in recorder.requests)
    assert all("put /bucket/runs" in request for request in recorder.requests)
