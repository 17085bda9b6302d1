"""SeaweedFS as the S3 server of a run: how it is started, durable, and how it is asked."""

import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

import httpx
import structlog
from pydantic import SecretStr

from shared.store import StoreSettings, open_store

LOOPBACK = "127.0.0.1"
BUCKET = "digenrl"
FSYNC_RULE = {"locations": [{"locationPrefix": "/", "fsync": True}]}
"""A rule for SeaweedFS's filer: it flushes an object to the disk before it answers the put."""
INDEX_AND_START = '"$0" fix -ignoreError=true "$1"; shift; exec "$0" mini "$@"'
"""A shell command that rebuilds the indexes of the volumes ($1) and then starts SeaweedFS. The
rule flushes the data of an object but not its index entry, which a power cut may destroy."""
READY = "digenrl-ready"
"""Object that is written to see that it answers."""

Prepare = Callable[[httpx.AsyncClient], Awaitable[None]]

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Server:
    """An S3 server at an address of this machine, and a user who may do everything there."""

    host: str
    port: int
    access_key: str
    secret_key: str

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}"

    @property
    def settings(self) -> StoreSettings:
        return StoreSettings(
            url=f"s3://{BUCKET}",
            endpoint=self.url,
            access_key=SecretStr(self.access_key),
            secret_key=SecretStr(self.secret_key),
        )

    @property
    def environment(self) -> dict[str, str]:
        return {
            "AWS_ACCESS_KEY_ID": self.access_key,
            "AWS_SECRET_ACCESS_KEY": self.secret_key,
            "GOMEMLIMIT": "512MiB",
        }

    async def ready(self, prepare: Prepare | None = None) -> bool:
        """Write an object; raises an error of HTTP or of the store if that cannot be done.

        Args:
            prepare: what has to be done before, once somebody listens.
        """
        async with httpx.AsyncClient(verify=False) as client:  # fails at once while nobody listens
            await client.get(f"{self.url}/")
            if prepare is not None:
                await prepare(client)
        await open_store(self.settings).write(READY, b"")
        return True


async def set_fsync_rule(filer: int, client: httpx.AsyncClient) -> None:
    """Have the filer at this port flush what it stores, before it answers."""
    conf = {"file": ("filer.conf", json.dumps(FSYNC_RULE).encode())}
    answer = await client.post(f"http://{LOOPBACK}:{filer}/etc/seaweedfs/", files=conf)
    answer.raise_for_status()


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
