"""SeaweedFS as the S3 server of a run: start, durability, and health checks."""

import asyncio
import base64
import contextlib
import errno
import hmac
import json
import socket
import ssl
import time
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass
from pathlib import Path

import httpx
from pydantic import SecretStr

from digenrl.local.brokers.nats_config import quoted
from digenrl.local.limits import MAX_GARBAGE, SOCKET_BIND_S, VACUUM_PAUSE_S, VACUUM_S
from digenrl.local.secrets.certificates import Certificate, authority_in
from digenrl.local.secrets.keys import Keys
from digenrl.local.secrets.tokens import write_secret
from shared.messages.rights import ROLES
from shared.run.rights import WRITES
from shared.store import StoreSettings, open_store

LOOPBACK = "127.0.0.1"
BUCKET = "digenrl"
FSYNC_RULE = {"locations": [{"locationPrefix": "/", "fsync": True}]}
"""Rule for SeaweedFS's filer: flush an object to the disk before the put is acknowledged."""
HOME_FOLDER = "seaweedfs"
"""Home folder of SeaweedFS, next to the volumes: settings, sockets and logs."""
VOLUMES = "../objects"
"""Path of the volumes, relative to the home folder."""
START_IN_HOME = 'cd "$1" && shift && exec "$0" -logdir=. "$@"'
"""Shell command that starts a SeaweedFS server in its home folder ($1)."""
INDEX_AND_START = f'cd "$1" && "$0" -logdir=. fix -ignoreError=true {VOLUMES}; {START_IN_HOME}'
"""Shell command that rebuilds the indexes of the volumes and then starts a server.

`FSYNC_RULE` flushes the data of an object but not its index entry, which a power cut may destroy.
The command uses relative paths for three reasons: `-dir` splits paths at commas, SeaweedFS expands
`$`, and the path of a socket has at most 107 bytes."""
ENVIRONMENT = {
    "HOME": ".",
    "GOMEMLIMIT": "512MiB",
    "WEED_LEVELDB2_ENABLED": "false",
    "WEED_SQLITE_ENABLED": "true",
    "WEED_SQLITE_DBFILE": f"file:{VOLUMES}/filer.db"
    "?_pragma=journal_mode(WAL)&_pragma=synchronous(FULL)&_pragma=wal_autocheckpoint(200)",
}
"""Environment variables of SeaweedFS. The filer stores object names in SQLite, which flushes every
change. The default, LevelDB, never flushes."""
OWNER = "digenrl"
"""Access key of the identity with all rights."""
IDENTITIES = ".seaweedfs/s3.json"
"""File in the home folder with the S3 identities and their rights."""
READY_OBJECT = "digenrl-ready"
"""Object that the readiness check writes."""

Prepare = Callable[[httpx.AsyncClient], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Server:
    """An S3 server on this machine, with the credentials of its owner."""

    host: str
    port: int
    access_key: str
    secret_key: str
    ca: str | None = None
    """CA certificates (PEM) that verify the server; None: the server has no TLS."""

    @property
    def url(self) -> str:
        return f"{'http' if self.ca is None else 'https'}://{self.host}:{self.port}"

    @property
    def settings(self) -> StoreSettings:
        return StoreSettings(
            url=f"s3://{BUCKET}",
            endpoint=self.url,
            access_key=SecretStr(self.access_key),
            secret_key=SecretStr(self.secret_key),
            ca=self.ca,
        )

    async def ready(self, prepare: Prepare | None = None) -> bool:
        """Write an object to check that the server is ready.

        Args:
            prepare: is called when the S3 port listens, before the write.

        Raises:
            httpx.HTTPError: if the server does not listen.
            Unavailable: if the write fails.
        """
        async with httpx.AsyncClient(verify=False, trust_env=False) as client:
            # Fails immediately if no server listens; the store would retry.
            await client.get(f"{self.url}/")
            if prepare is not None:
                await prepare(client)
        await open_store(self.settings).write(READY_OBJECT, b"")
        return True


@dataclass(frozen=True, slots=True)
class InternalTls:
    """Mutual TLS between the servers of SeaweedFS, so that no other process can use their ports."""

    ca: Path
    certificate: Certificate

    @property
    def context(self) -> ssl.SSLContext:
        context = ssl.create_default_context(cafile=str(self.ca))
        context.load_cert_chain(self.certificate.cert, self.certificate.key)
        return context


def make_internal_tls(home: Path) -> InternalTls:
    """Create the authority and the certificate of SeaweedFS's internal ports.

    Other users of this machine and other containers do not have it, and cannot connect."""
    home.mkdir(mode=0o700, parents=True, exist_ok=True)
    authority = authority_in(home / "ca")
    ca = authority.folder / "cert.pem"
    return InternalTls(ca.absolute(), authority.certificate(home.absolute() / "inside", [LOOPBACK]))


async def set_fsync_rule(
    filer: int, secret: str, internal_tls: InternalTls | None, _: httpx.AsyncClient
) -> None:
    """Set `FSYNC_RULE` in the filer that listens on the port ``filer``."""
    conf = {"file": ("filer.conf", json.dumps(FSYNC_RULE).encode())}
    headers = {"authorization": f"Bearer {_signed(_derived(secret, 'filer'))}"}
    async with _internal_client(filer, internal_tls) as client:
        (await client.post("/etc/seaweedfs/", files=conf, headers=headers)).raise_for_status()


async def vacuum_repeatedly(master: int, internal_tls: InternalTls | None) -> None:
    """Vacuum volumes with much garbage; SeaweedFS itself vacuums only every 17 minutes."""
    while True:
        await asyncio.sleep(VACUUM_PAUSE_S)
        async with _internal_client(master, internal_tls) as client:
            with contextlib.suppress(httpx.HTTPError):  # SeaweedFS may be restarting
                await client.get("/vol/vacuum", params={"garbageThreshold": MAX_GARBAGE})


def _internal_client(port: int, internal_tls: InternalTls | None) -> httpx.AsyncClient:
    scheme, verify = ("http", False) if internal_tls is None else ("https", internal_tls.context)
    address = f"{scheme}://{LOOPBACK}:{port}"
    return httpx.AsyncClient(base_url=address, verify=verify, timeout=VACUUM_S, trust_env=False)


def write_settings(
    home: Path,
    keys: str | Keys,
    internal_tls: InternalTls | None = None,
    runs: Collection[str] = (),
) -> None:
    """Write the configuration files of SeaweedFS, which contain secrets.

    Internal HTTP ports then require a signature for reads, writes and deletes.

    Args:
        internal_tls: all internal ports also require this client certificate.
        runs: runs to which roles can write.
    """
    folder = home / ".seaweedfs"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    secret = keys if isinstance(keys, str) else keys.store
    signing = {
        "jwt.signing": "volume", "jwt.signing.read": "volume-read",
        "jwt.filer_signing": "filer", "jwt.filer_signing.read": "r",
    }  # fmt: skip
    tables = [
        f'[{name}]\nkey = "{_derived(secret, purpose)}"\n' for name, purpose in signing.items()
    ]
    if internal_tls is not None:
        tables += _certificates(internal_tls)
    write_secret(folder / "security.toml", "\n".join(tables))
    write_secret(home / IDENTITIES, json.dumps({"identities": _identities(keys, runs)}, indent=1))


_GRPC = ("master", "volume", "filer", "s3", "admin", "worker", "client")
_HTTPS = ("master", "volume", "filer", "admin", "client")


def _certificates(internal_tls: InternalTls) -> list[str]:
    """Return TOML tables: all ports of SeaweedFS except S3 require a client certificate."""
    ca, certificate = quoted(internal_tls.ca), internal_tls.certificate
    files = f"cert = {quoted(certificate.cert)}\nkey = {quoted(certificate.key)}\n"
    return [
        f"[grpc]\nca = {ca}\n",
        *(f"[grpc.{part}]\n{files}" for part in _GRPC),
        *(f"[https.{part}]\nenabled = true\n{files}ca = {ca}\n" for part in _HTTPS),
    ]


def _identities(keys: str | Keys, runs: Collection[str]) -> list[dict[str, object]]:
    """Return the S3 identities: the owner has all rights, a role has the rights of `WRITES`.

    A `*` also matches slashes, so each rule names a run: `*/files/*` would match `commits/files/`.
    """
    owner = _identity(OWNER, keys if isinstance(keys, str) else keys.store, ["Admin"])
    if isinstance(keys, str):
        return [owner]
    reads = [f"Read:{BUCKET}", f"List:{BUCKET}"]
    return [owner] + [
        _identity(
            role,
            keys.secret(role),
            reads + [f"Write:{BUCKET}/{run}/{at}*" for run in runs for at in WRITES[role]],
        )
        for role in ROLES
    ]


def _identity(name: str, secret: str, actions: list[str]) -> dict[str, object]:
    credentials = [{"accessKey": name, "secretKey": secret}]
    return {"name": name, "credentials": credentials, "actions": actions}


def _derived(secret: str, purpose: str) -> str:
    return hmac.digest(secret.encode(), purpose.encode(), "sha256").hex()


def _signed(key: str) -> str:
    """Return a JSON Web Token that is valid for ten seconds."""
    parts = ({"alg": "HS256", "typ": "JWT"}, {"exp": int(time.time()) + 10})
    payload = ".".join(_base64(json.dumps(part).encode()) for part in parts)
    return f"{payload}.{_base64(hmac.digest(key.encode(), payload.encode(), 'sha256'))}"


def _base64(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


def remove_sockets(ports: Collection[int]) -> None:
    """Remove leftover sockets of SeaweedFS: the server's own, and sockets of killed servers.

    SeaweedFS always creates some sockets in /tmp.

    Args:
        ports: gRPC ports of the server that has ended.
    """
    for path in Path("/tmp").glob("seaweedfs-*.sock"):
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as probe:
            is_own = any(path.name.endswith(f"-{port}.sock") for port in ports)
            is_old = time.time() - path.stat().st_mtime > SOCKET_BIND_S
            if (is_own or is_old) and probe.connect_ex(str(path)) == errno.ECONNREFUSED:
                path.unlink()
