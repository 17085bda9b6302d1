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
from digenrl.local.secrets.certificates import Certificate, authority_in
from digenrl.local.secrets.keys import Keys
from digenrl.local.secrets.tokens import write_secret
from shared.messages.rights import ROLES
from shared.run.rights import WRITES
from shared.store import StoreSettings, open_store

LOOPBACK = "127.0.0.1"
BUCKET = "digenrl"
FSYNC_RULE = {"locations": [{"locationPrefix": "/", "fsync": True}]}
"""A rule for SeaweedFS's filer: it flushes an object to the disk before it answers the put."""
HOME_FOLDER = "seaweedfs"
"""Folder next to the volumes, with the settings, sockets and logs of SeaweedFS."""
VOLUMES = "../objects"
"""The volumes as its home folder reaches them."""
START_IN_HOME = 'cd "$1" && shift && exec "$0" -logdir=. "$@"'
"""A shell command that starts a part of SeaweedFS in its home folder ($1)."""
INDEX_AND_START = f'cd "$1" && "$0" -logdir=. fix -ignoreError=true {VOLUMES}; {START_IN_HOME}'
"""A shell command that rebuilds the indexes of the volumes and then starts SeaweedFS. The rule
flushes the data of an object but not its index entry, which a power cut may destroy. Paths are
relative: `-dir` splits them at commas, `$` is expanded, and a socket's path has 107 bytes."""
ENVIRONMENT = {
    "HOME": ".",
    "GOMEMLIMIT": "512MiB",
    "WEED_LEVELDB2_ENABLED": "false",
    "WEED_SQLITE_ENABLED": "true",
    "WEED_SQLITE_DBFILE": f"file:{VOLUMES}/filer.db"
    "?_pragma=journal_mode(WAL)&_pragma=synchronous(FULL)&_pragma=wal_autocheckpoint(200)",
}
"""Its own: object names are in SQLite, which flushes every change; its default, LevelDB, never
flushes."""
SOCKET_BIND_S = 60
"""Age of a socket after which its owner has started to listen, if ever."""
VACUUM_S = 60
"""Longest time for which what was deleted takes space on the disk."""
SWEEP_S = 40
"""Seconds between two sweeps, so that they keep to that on a busy machine as well."""
MAX_GARBAGE = 0.3
"""Share of deleted bytes above which a sweep rewrites a volume."""
OWNER = "digenrl"
"""Access key of the owner, who has all rights."""
IDENTITIES = ".seaweedfs/s3.json"
"""File in the home folder with the rights over S3."""
READY_OBJECT = "digenrl-ready"
"""Object that is written to see that it answers."""

Prepare = Callable[[httpx.AsyncClient], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Server:
    """An S3 server at an address of this machine, and a user who may do everything there."""

    host: str
    port: int
    access_key: str
    secret_key: str
    ca: str | None = None
    """Certificates, as PEM text, that verify it; None: it speaks without TLS."""

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
        """Write an object; raises an error of HTTP or of the store if that cannot be done.

        Args:
            prepare: preparation after the first port listens.
        """
        async with httpx.AsyncClient(verify=False, trust_env=False) as client:
            # Fails at once while nobody listens.
            await client.get(f"{self.url}/")
            if prepare is not None:
                await prepare(client)
        await open_store(self.settings).write(READY_OBJECT, b"")
        return True


@dataclass(frozen=True, slots=True)
class InternalTls:
    """Authority and certificate by which the parts of SeaweedFS know one another: no other process
    may use their ports."""

    ca: Path
    certificate: Certificate

    @property
    def context(self) -> ssl.SSLContext:
        context = ssl.create_default_context(cafile=str(self.ca))
        context.load_cert_chain(self.certificate.cert, self.certificate.key)
        return context


def make_internal_tls(home: Path) -> InternalTls:
    """Return what SeaweedFS's own ports require, so that no other user of this machine, and no
    other container, uses them."""
    home.mkdir(mode=0o700, parents=True, exist_ok=True)
    authority = authority_in(home / "ca")
    ca = authority.folder / "cert.pem"
    return InternalTls(ca.absolute(), authority.certificate(home.absolute() / "inside", [LOOPBACK]))


async def set_fsync_rule(
    filer: int, secret: str, inside: InternalTls | None, _: httpx.AsyncClient
) -> None:
    """Have the filer at this port flush what it stores, before it answers."""
    conf = {"file": ("filer.conf", json.dumps(FSYNC_RULE).encode())}
    headers = {"authorization": f"Bearer {_signed(_derived(secret, 'filer'))}"}
    async with _part_at(filer, inside) as client:
        (await client.post("/etc/seaweedfs/", files=conf, headers=headers)).raise_for_status()


async def keep_swept(master: int, inside: InternalTls | None) -> None:
    """Have volumes with much garbage rewritten: SeaweedFS itself does so every 17 minutes."""
    while True:
        await asyncio.sleep(SWEEP_S)
        async with _part_at(master, inside) as client:
            with contextlib.suppress(httpx.HTTPError):  # it is restarted meanwhile
                await client.get("/vol/vacuum", params={"garbageThreshold": MAX_GARBAGE})


def _part_at(port: int, inside: InternalTls | None) -> httpx.AsyncClient:
    scheme, verify = ("http", False) if inside is None else ("https", inside.context)
    address = f"{scheme}://{LOOPBACK}:{port}"
    return httpx.AsyncClient(base_url=address, verify=verify, timeout=VACUUM_S, trust_env=False)


def write_settings(
    home: Path, keys: str | Keys, inside: InternalTls | None = None, runs: Collection[str] = ()
) -> None:
    """Write what SeaweedFS reads from its home folder, with secrets.

    Its own ports then want a signature for what they read, write and delete over HTTP, and with
    ``inside`` the certificate of one of its parts for anything at all. Roles write to these runs.
    """
    folder = home / ".seaweedfs"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    secret = keys if isinstance(keys, str) else keys.store
    signing = {
        "jwt.signing": "volume", "jwt.signing.read": "volume-read",
        "jwt.filer_signing": "filer", "jwt.filer_signing.read": "r",
    }  # fmt: skip
    tables = [f'[{name}]\nkey = "{_derived(secret, of)}"\n' for name, of in signing.items()]
    if inside is not None:
        tables += _certificates(inside)
    write_secret(folder / "security.toml", "\n".join(tables))
    write_secret(home / IDENTITIES, json.dumps({"identities": _identities(keys, runs)}, indent=1))


_GRPC = ("master", "volume", "filer", "s3", "admin", "worker", "client")
_HTTPS = ("master", "volume", "filer", "admin", "client")


def _certificates(inside: InternalTls) -> list[str]:
    """Return tables by which every port of SeaweedFS but the one for S3 asks for a certificate."""
    ca, made = quoted(inside.ca), inside.certificate
    files = f"cert = {quoted(made.cert)}\nkey = {quoted(made.key)}\n"
    return [
        f"[grpc]\nca = {ca}\n",
        *(f"[grpc.{part}]\n{files}" for part in _GRPC),
        *(f"[https.{part}]\nenabled = true\n{files}ca = {ca}\n" for part in _HTTPS),
    ]


def _identities(keys: str | Keys, runs: Collection[str]) -> list[dict[str, object]]:
    """Return the rights: the owner has all, a role the rights in its description.

    A `*` matches slashes as well, so a rule names the run: `*/files/*` reaches `commits/files/`.
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
    """Return a JSON Web Token that SeaweedFS takes for ten seconds."""
    parts = ({"alg": "HS256", "typ": "JWT"}, {"exp": int(time.time()) + 10})
    said = ".".join(_base64(json.dumps(part).encode()) for part in parts)
    return f"{said}.{_base64(hmac.digest(key.encode(), said.encode(), 'sha256'))}"


def _base64(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


def remove_sockets(ports: Collection[int]) -> None:
    """Remove the sockets of an ended store, at these ports of gRPC, and of killed ones: SeaweedFS
    makes some in /tmp, and no option changes that."""
    for path in Path("/tmp").glob("seaweedfs-*.sock"):
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as probe:
            is_own = any(path.name.endswith(f"-{port}.sock") for port in ports)
            is_old = time.time() - path.stat().st_mtime > SOCKET_BIND_S
            if (is_own or is_old) and probe.connect_ex(str(path)) == errno.ECONNREFUSED:
                path.unlink()
