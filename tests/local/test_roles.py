"""What each role may do in a real object store and a real Redis: exactly what is described."""

import asyncio
import os
import posixpath
import socket
import ssl
import subprocess
from collections.abc import Awaitable, Callable
from pathlib import Path

import httpx
import psutil
import pytest
import redis.asyncio as redis
from pydantic import SecretStr
from redis.exceptions import AuthenticationError, NoPermissionError

from digenrl.local.brokers.embedded import BUCKET, Brokers, plan_brokers
from digenrl.local.brokers.seaweedfs import OWNER
from digenrl.local.secrets.keys import Keys, load_keys
from shared.errors import Unavailable
from shared.messages.contracts import ObjectRef, Policy
from shared.messages.rights import ROLES, Role
from shared.run.rights import REDIS, WRITES
from shared.run.versions import Version, VersionIndex
from shared.store import ObjectStore, StoreSettings, open_store
from tests.brokers import StartProgram, program
from tests.local.signed import request

RUN = "digits"
Stores = Callable[[str], ObjectStore]
Url = Callable[[Role], str]
PLACES = sorted({place for places in WRITES.values() for place in places})


@pytest.fixture
def keys(tmp_path: Path) -> Keys:
    return load_keys(tmp_path / "brokers")


@pytest.fixture
def planned(tmp_path: Path, keys: Keys) -> Brokers:
    return plan_brokers(tmp_path / "brokers", keys, runs=[RUN])


@pytest.fixture
def objects(planned: Brokers, start: StartProgram) -> "subprocess.Popen[bytes]":
    return start(program(planned, "objects"))


@pytest.fixture
def valkey(planned: Brokers, start: StartProgram) -> None:
    start(program(planned, "valkey"))


def store_as(planned: Brokers, access_key: str, secret_key: str) -> ObjectStore:
    return open_store(
        StoreSettings(
            url=f"s3://{BUCKET}",
            endpoint=planned.environment["DIGENRL_S3_ENDPOINT"],
            access_key=SecretStr(access_key),
            secret_key=SecretStr(secret_key),
        )
    )


async def may(act: Awaitable[object]) -> bool:
    try:
        await act
    except Unavailable as error:
        assert "refuses these keys" in str(error) or "Denied" in str(error), error
        return False
    return True


def key_at(place: str, name: str = "x") -> str:
    return f"{RUN}/{place}{name if place.endswith('/') else ''}"


def stores_of(planned: Brokers) -> Stores:
    """Return what somebody has with the keys of a role, or of the owner."""
    logins = {str(role): [*secrets.values()][2:] for role, secrets in planned.secrets.items()}
    logins[OWNER] = [*planned.owner.values()]
    return lambda role: store_as(planned, *logins[role])


async def each_role_writes_and_deletes_where_it_is_described_and_reads_all(stores: Stores) -> None:
    owner = stores(OWNER)
    for place in PLACES:
        await owner.write(key_at(place), b"kept")
    for role in ROLES:
        store = stores(role)
        for place in PLACES:
            allowed = place.startswith(WRITES[role])
            assert await may(store.write(key_at(place), b"other")) == allowed, (role, place)
            assert await may(store.create(key_at(place, role), b"new")) == allowed, (role, place)
            assert await may(store.delete([key_at(place)])) == allowed, (role, place)
            await owner.write(key_at(place), b"kept")
            assert await store.read(key_at(place)) == b"kept"
        assert await store.keys(f"{RUN}/commits")
        assert not await may(store.write("elsewhere", b"x"))
    makers = {role for role in ROLES if "commits/" in WRITES[role]}
    assert makers == {"trainer"}


async def test_what_each_role_may_do_in_the_store(
    planned: Brokers, objects: "subprocess.Popen[bytes]"
) -> None:
    await each_role_writes_and_deletes_where_it_is_described_and_reads_all(stores_of(planned))


POSITIONS = (
    "commits/{}", "copies/00000001/{}", "weights/{}", "a/b/{}", "{}commits/00000009.json",
    "../other/{}", "../{}", "../digits2/{}", "./{}", "/{}",
)  # fmt: skip
"""Where a role may not write, although its own folder or object stands somewhere in the name."""


@pytest.mark.slow
async def test_a_folder_of_a_role_gives_it_no_right_at_any_other_place(
    planned: Brokers, keys: Keys, objects: "subprocess.Popen[bytes]"
) -> None:
    """`*` in a rule of SeaweedFS matches slashes, so names of folders at other places are tried."""
    endpoint, wrong = planned.environment["DIGENRL_S3_ENDPOINT"], []
    owner = store_as(planned, *planned.owner.values())
    for role in ROLES:
        for place in WRITES[role]:
            for position in POSITIONS:
                key = f"{RUN}/{position.format(key_at(place)[len(RUN) + 1 :])}"
                path = posixpath.normpath(key)
                if any(path.startswith(f"{RUN}/{each}") for each in WRITES[role]):
                    continue
                for method in ("PUT", "DELETE"):
                    answer = await request(
                        endpoint, (role, keys.secret(role)), method, f"/{BUCKET}/{key}", body=b"{}"
                    )
                    if answer.is_success:
                        wrong.append((role, method, key))
    assert wrong == []
    assert [each for each in await owner.keys(RUN) if each != "digenrl-ready"] == []


def answered(port: int, *, encrypted: bool) -> bytes:
    """What a port of this machine answers to somebody without a key or a certificate."""
    at = f"/buckets/{BUCKET}/{RUN}/commits/00000001.json"
    request = f"GET {at} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n".encode()
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    try:
        with (
            socket.create_connection(("127.0.0.1", port), timeout=5) as raw,
            context.wrap_socket(raw) if encrypted else raw as connection,
        ):
            connection.sendall(request)
            return connection.recv(1 << 16)
    except (OSError, ssl.SSLError) as error:
        return repr(error).encode()


async def test_the_store_asks_everybody_at_all_its_ports(
    planned: Brokers, keys: Keys, objects: "subprocess.Popen[bytes]"
) -> None:
    owner = store_as(planned, *planned.owner.values())
    await owner.write(f"{RUN}/commits/00000001.json", b"the truth")
    for login in (("trainer", "wrong"), ("trainer", keys.secret("rollout")),
                  ("digenrl", "digenrl-local")):  # fmt: skip
        assert not await may(store_as(planned, *login).read(f"{RUN}/commits/00000001.json"))
    at = f"/{BUCKET}/{RUN}/commits/00000001.json"
    async with httpx.AsyncClient(verify=False) as client:
        for method in ("GET", "HEAD", "PUT", "POST", "DELETE"):
            url = f"{planned.environment['DIGENRL_S3_ENDPOINT']}{at}"
            assert (await client.request(method, url)).status_code in (400, 403, 405), method
    listening = {
        each.laddr.port
        for each in psutil.Process(objects.pid).net_connections("inet")
        if each.status == psutil.CONN_LISTEN
    }
    assert len(listening) >= 8, "S3, master, volume, filer and admin, with gRPC beside"
    for port in listening - {planned.s3_port}:
        plain = answered(port, encrypted=False)
        assert plain.startswith(b"HTTP/1.0 400") or b"HTTP" not in plain, (port, plain)
        assert b"CERTIFICATE_REQUIRED" in answered(port, encrypted=True), port
    assert await owner.read(f"{RUN}/commits/00000001.json") == b"the truth"


def version(number: int) -> Version:
    digest = f"{number:064x}"
    return Version(
        policy=Policy(version=number, weights_digest=digest),
        weights=ObjectRef(key=f"{RUN}/weights/{digest}", sha256=digest, size=1),
    )


Act = Callable[["redis.Redis"], Awaitable[object]]
COMMANDS: dict[str, tuple[Act, set[Role]]] = {
    "ping": (lambda client: client.ping(), set(ROLES)),
    "get": (lambda client: client.get(f"dg:wv:{RUN}"), {"scheduler", "rollout"}),
    "set": (lambda client: client.set(f"dg:wv:{RUN}:9", "x"), {"scheduler"}),
    "delete": (lambda client: client.delete(f"dg:wv:{RUN}"), {"scheduler"}),
    "tell": (lambda client: client.rpush(f"dg:peers:{RUN}:a", "x"), {"rollout", "trainer"}),
    "hear": (lambda client: client.lrange(f"dg:peers:{RUN}:a", 0, 1), {"rollout", "trainer"}),
    "elsewhere": (lambda client: client.set("other", "x"), set()),
    "read elsewhere": (lambda client: client.get("other"), set()),
    "keys": (lambda client: client.keys("*"), set()),
    "flush": (lambda client: client.flushall(), set()),
    "script": (lambda client: client.eval("return 1", 0), set()),
    "config": (lambda client: client.config_get("*"), set()),
    "acl": (lambda client: client.acl_list(), set()),
}


async def each_role_does_in_redis_what_is_described_and_nobody_is_anonymous(url: Url) -> None:
    for name, (act, allowed) in COMMANDS.items():
        did = set()
        for role in ROLES:
            async with redis.from_url(url(role)) as client:
                try:
                    await act(client)
                    did.add(role)
                except NoPermissionError:
                    pass
        assert did == allowed, name
    at = url("trainer").partition("@")[2]
    rollouts = url("rollout").partition("@")[0].rpartition(":")[2]
    for login in ("", ":x@", "trainer:x@", f"trainer:{rollouts}@"):
        for protocol in (2, 3):
            async with redis.from_url(f"redis://{login}{at}", protocol=protocol) as client:
                with pytest.raises(AuthenticationError):
                    await client.ping()


async def test_what_each_role_may_do_in_redis(planned: Brokers, valkey: None) -> None:
    await each_role_does_in_redis_what_is_described_and_nobody_is_anonymous(
        lambda role: planned.secrets[role]["DIGENRL_REDIS_URL"]
    )


def test_what_was_written_in_transactions_is_there_after_a_restart(
    planned: Brokers, start: StartProgram
) -> None:
    """Redis reads its own log as the user whom nobody can be."""

    async def write() -> None:
        url = planned.secrets["scheduler"]["DIGENRL_REDIS_URL"]
        async with VersionIndex.connect(url, run=RUN) as index:
            await index.rebuild([])
            for number in range(3):
                await index.publish(version(number))

    async def read() -> list[Version | None]:
        url = planned.secrets["rollout"]["DIGENRL_REDIS_URL"]
        async with VersionIndex.connect(url, run=RUN) as index:
            return [await index.lookup(number) for number in range(3)]

    process: subprocess.Popen[bytes] = start(program(planned, "valkey"))
    asyncio.run(write())
    process.kill()
    process.wait()
    start(program(planned, "valkey"))
    assert asyncio.run(read()) == [version(number) for number in range(3)]


def test_secrets_are_in_files_of_their_owner_and_in_no_command_line_or_environment(
    planned: Brokers, keys: Keys, tmp_path: Path
) -> None:
    keys.write(planned.secrets)
    secrets = [keys.store, *(keys.secret(role) for role in ROLES)]
    assert len(set(secrets)) == len(secrets)
    for each in planned.programs:
        said = " ".join([*each.argv, *each.environment.values()])
        assert not any(secret in said for secret in secrets), each.name
    assert not any(secret in str(planned.environment) for secret in secrets)
    holding = [
        path
        for path in tmp_path.rglob("*")
        if path.is_file() and any(secret in path.read_text() for secret in secrets)
    ]
    assert holding and all(path.stat().st_mode & 0o777 == 0o600 for path in holding)
    assert all(os.stat(keys.folder / role).st_mode & 0o777 == 0o700 for role in ROLES)  # noqa: PTH116


@pytest.mark.slow
def test_every_command_of_redis_is_allowed_or_denied_as_described(
    planned: Brokers, keys: Keys, start: StartProgram
) -> None:
    """All commands that the server has, with every role, and with keys of the run and others."""
    config = program(planned, "valkey").config
    assert config is not None
    config.write_text(config.read_text() + "user judge on >judge ~* &* +@all\n")
    start(program(planned, "valkey"))
    url = f"redis://judge:judge@127.0.0.1:{planned.redis_port}"

    async def look() -> None:
        async with redis.from_url(url, decode_responses=True) as client:
            commands = [str(name) for name in await client.command_list()]
            assert len(commands) > 200
            for role in ROLES:
                named = {word[1:] for word in REDIS[role].split() if word.startswith("+")}
                keys_of_run = ("dg:wv:x", "dg:peers:x")
                may = [
                    name
                    for name in commands
                    if any([await allows(client, role, name, key) for key in keys_of_run])
                ]
                whole = {name for name in named if "|" not in name} - BEFORE_LOGIN
                of_parts = {name.partition("|")[0] for name in named if "|" in name}
                assert set(may) - BEFORE_LOGIN - of_parts == whole, role
                other = {name for name in commands if await allows(client, role, name, "other")}
                assert other <= KEYLESS | BEFORE_LOGIN | of_parts, (role, other)

    asyncio.run(look())


BEFORE_LOGIN = {"hello", "auth", "quit", "reset"}
"""Commands that nobody can be refused, as one proves oneself by them."""
KEYLESS = {"ping", "multi", "exec", "discard", "unwatch", "scan"}
"""Commands that name no key; SCAN shows the names of keys, and only the scheduler may ask it."""


async def allows(client: "redis.Redis", role: Role, command: str, key: str) -> bool:
    """Whether the role may do this with a key, as the server itself says."""
    for number in range(1, 8):
        arguments = [key] * (number - 1)
        try:
            said = await client.acl_dryrun(role, command, *arguments)
        except redis.ResponseError as error:
            if "not found" in str(error):  # a word before subcommands, which is no command itself
                return False
            assert "wrong number" in str(error).lower() or "arguments" in str(error).lower(), error
            continue
        return bool(said == "OK")
    return False
