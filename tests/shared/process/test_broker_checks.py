"""A service does not start on brokers that are open to anybody, too old, or lose what they say."""

import asyncio
import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

import pytest

from digenrl.commands.options import settings_from_options
from digenrl.local.brokers.embedded import Brokers, Program, plan_brokers
from shared.bus.bus import Bus
from shared.bus.connection import check_server
from shared.errors import UserError
from shared.process.settings import Endpoints
from shared.process.store_check import check_store
from shared.run.versions import VersionIndex
from shared.store import ObjectStore, StoreSettings
from shared.store.redis_client import _check_version
from tests.brokers import PASSWORD, StartProgram, program
from tests.http_server import QuietHandler, serving


@pytest.fixture
def brokers(tmp_path: Path) -> Brokers:
    return plan_brokers(tmp_path / "brokers", PASSWORD)


def without(text: str, planned: Program, url: str) -> Program:
    """The program with lines of its configuration that begin so left out, and no way to log in."""
    config = planned.config
    assert config is not None
    lines = config.read_text().splitlines()
    config.write_text("\n".join(line for line in lines if not line.startswith(text)))

    async def ready() -> bool:
        at = urlsplit(url)
        _, writer = await asyncio.open_connection(at.hostname, at.port)
        writer.close()
        return True

    return dataclasses.replace(planned, ready=ready)


def test_an_open_nats_is_refused_unless_somebody_says_that_it_is_meant(
    brokers: Brokers, start: StartProgram
) -> None:
    url = f"nats://127.0.0.1:{brokers.nats_port}"
    start(without("authorization", program(brokers, "nats"), url))

    async def connect(may_be_open: bool) -> None:
        async with Bus.connect(url, run="demo", name="x", may_be_open=may_be_open):
            pass

    with pytest.raises(
        UserError, match=r"NATS at .* has no authentication.*DIGENRL_OPEN_BROKERS=1"
    ):
        asyncio.run(connect(False))
    asyncio.run(connect(True))


def test_an_open_redis_is_refused_also_to_who_proves_itself(
    brokers: Brokers, start: StartProgram
) -> None:
    url = f"redis://127.0.0.1:{brokers.redis_port}"
    start(without("requirepass", program(brokers, "valkey"), url))

    async def connect(may_be_open: bool) -> None:
        async with VersionIndex.connect(url, run="demo", may_be_open=may_be_open):
            pass

    with pytest.raises(
        UserError, match=r"Redis at .* has no authentication.*DIGENRL_OPEN_BROKERS=1"
    ):
        asyncio.run(connect(False))
    asyncio.run(connect(True))


def test_brokers_of_up_are_none_of_that(brokers: Brokers, start: StartProgram) -> None:
    start(program(brokers, "valkey"))

    async def connect() -> None:
        async with VersionIndex.connect(brokers.environment["DIGENRL_REDIS_URL"], run="demo"):
            pass

    asyncio.run(connect())


@pytest.mark.parametrize(
    ("info", "version", "says"),
    [
        ({"jetstream": True, "auth_required": True}, (2, 10), r"2\.10.*too old; install 2\.11"),
        ({"auth_required": True}, (2, 14), "has no JetStream"),
        ({"jetstream": True}, (2, 14), "has no authentication"),
    ],
)
def test_nats_is_new_stores_and_asks(
    info: dict[str, Any], version: tuple[int, int], says: str
) -> None:
    class Version(SimpleNamespace):
        def __str__(self) -> str:
            return ".".join(map(str, version))

    said = Version(major=version[0], minor=version[1])
    client: Any = SimpleNamespace(_server_info=info, connected_server_version=said)
    with pytest.raises(UserError, match=says) as refused:
        check_server(client, "nats://host", may_be_open=False)
    assert "\n" not in str(refused.value)


def test_an_old_redis_is_refused_in_either_protocol() -> None:
    for hello in ([b"server", b"redis", b"version", b"6.2.14"], {b"version": b"6.2.14"}):
        with pytest.raises(UserError, match=r"6\.2\.14, too old; install 7\.0"):
            _check_version(hello, "redis://host")
        _check_version({b"version": b"7.2.4"}, "redis://host")


class Forgetful:
    """A bucket that creates an object again and again."""

    def __init__(self, *answers: bool) -> None:
        self.answers = list(answers)

    async def create(self, key: str, data: bytes) -> bool:
        return self.answers.pop(0)


@contextmanager
def answering(status: int) -> Iterator[str]:
    class Handler(QuietHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.end_headers()

    with serving(Handler) as url:
        yield url


async def test_a_store_that_shows_its_objects_or_creates_one_twice_is_refused() -> None:
    backend: Any = Forgetful(True, True)
    settings = StoreSettings(url="s3://bucket")
    with pytest.raises(UserError, match="creates an object that is there already"):
        await check_store(settings, ObjectStore(backend), "run/files/x.json", may_be_open=True)
    for status, is_refused in ((200, True), (403, False)):
        with answering(status) as url:
            of_it = dataclasses.replace(settings, endpoint=url)
            for may_be_open in (True, False):
                backend = Forgetful(False, False)
                check = check_store(of_it, ObjectStore(backend), "x", may_be_open=may_be_open)
                if is_refused and not may_be_open:
                    with pytest.raises(UserError, match="without a key; give it users"):
                        await check
                else:
                    await check


@pytest.mark.parametrize(
    "url",
    ["http://host:4222", "nats://host:99999", "nats://user:pa55@host:x", "nats://", "host:4222"],
)
def test_an_address_that_no_client_connects_to_is_refused_without_its_password(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DIGENRL_RUN", "test")
    monkeypatch.setenv("DIGENRL_NATS_URL", url)
    with pytest.raises(UserError) as refused:
        settings_from_options()
    assert str(refused.value) == (
        "--nats_url or DIGENRL_NATS_URL: not an address as nats://user:password@host:port"
    )


def test_what_is_trusted_is_text_and_no_name_of_a_file() -> None:
    with pytest.raises(UserError, match="DIGENRL_CA: no certificate as PEM text"):
        _ = Endpoints(ca="/etc/ca.pem").trusted
