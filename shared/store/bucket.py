"""Objects in a bucket: S3 (Amazon, SeaweedFS, Ceph ...), Google Cloud Storage or Azure, through
obstore.

Exclusive create is the service's own conditional put (``If-None-Match: *`` on S3 and Azure,
generation 0 on Google). `StoreSettings` have the endpoint and credentials of an S3 service; the
defaults come from the variables and files of each cloud's own tools (``AWS_REGION``,
``AWS_SESSION_TOKEN``, ``GOOGLE_APPLICATION_CREDENTIALS``, ``AZURE_STORAGE_ACCOUNT_NAME`` ...).
"""

import atexit
import contextlib
import os
import ssl
import tempfile
import time
from collections.abc import AsyncGenerator, Awaitable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import obstore
from obstore.exceptions import (
    AlreadyExistsError,
    BaseError,
    NotFoundError,
    PermissionDeniedError,
    UnauthenticatedError,
)
from obstore.store import from_url

from shared.errors import IntegrityError, Unavailable, UserError
from shared.limits import (
    MAX_PART_RETRY_TIME,
    MAX_PART_SILENCE,
    MAX_REQUEST_TIME,
    MAX_RETRY_PAUSE,
    MAX_RETRY_TIME,
    MAX_SILENCE,
    MAX_STORE_ATTEMPTS,
    MAX_STREAM_DELAY_S,
    STORE_CONNECT_TIMEOUT,
)
from shared.messages.contracts import ObjectRef
from shared.proxies import go_direct
from shared.store.backend import CHUNK, PIECE, Content, StoredObject
from shared.store.settings import StoreSettings

PART = 5 * 1024 * 1024
"""Bytes of a part of a large object; the least that S3 takes."""
MAX_PARALLEL_TIME = timedelta(seconds=2)
"""Parts that take longer are sent one at a time: on a slow line two would starve each other."""
UNKNOWN_PART_TIME = timedelta(seconds=30)
"""Time of a part that is assumed before the first large object is stored."""
PART_MARGIN = 3
"""A part is sent again after this factor over its usual time, and `MAX_SILENCE`."""
MAX_QUICK_BYTES = 1 << 19
"""Bytes that any line sends within `MAX_SILENCE`."""
DEFAULT_REGION = "us-east-1"


class BucketBackend:
    def __init__(self, settings: StoreSettings) -> None:
        """Raises UserError if a setting that the store needs is missing."""
        if settings.ca is not None:
            _trust(settings.ca)
        go_direct(settings.endpoint)
        self._settings, self._part_time = settings, UNKNOWN_PART_TIME
        self._clients = dict[tuple[timedelta, timedelta], Any]()
        try:
            self._store = self._client(MAX_SILENCE, MAX_RETRY_TIME)
        except (BaseError, ValueError) as error:
            raise UserError(f"store_url: {settings.url!r} cannot be used: {error}") from error

    def _client(self, silence: timedelta, retry_time: timedelta) -> Any:
        client = self._clients.get((silence, retry_time))
        if client is None:
            client = _open(self._settings, silence, retry_time)
            self._clients[silence, retry_time] = client
        return client

    async def write(self, key: str, data: Content) -> None:
        with _as_unavailable():
            if len(data) <= MAX_QUICK_BYTES:
                await obstore.put_async(self._store, key, data, use_multipart=False)
            else:
                await self._write_large(key, data)

    async def _write_large(self, key: str, data: Content) -> None:
        """Give a request as long as the newest parts suggest, and after a failure twice that."""
        silence, began = MAX_SILENCE, time.monotonic()
        while silence < min(MAX_PART_SILENCE, PART_MARGIN * self._part_time):
            silence *= 2
        in_parts = len(data) > PART
        client = self._client(silence, MAX_PART_RETRY_TIME if in_parts else MAX_RETRY_TIME)
        at_once = 2 if self._part_time < MAX_PARALLEL_TIME else 1
        try:
            await obstore.put_async(
                client, key, data,
                use_multipart=in_parts, chunk_size=PART, max_concurrency=at_once,
            )  # fmt: skip
        except BaseError:
            self._part_time = 2 * silence / PART_MARGIN
            raise
        self._part_time = timedelta(seconds=(time.monotonic() - began) * PART / len(data))

    async def write_unnamed(self, folder: str, data: Content, ref: Awaitable[ObjectRef]) -> None:
        """Store like `write` once the key is known: a bucket cannot rename what it has."""
        await self.write((await ref).key, data)

    async def create(self, key: str, data: bytes) -> bool:
        """Store in one request, for any size: a condition holds for a whole put only."""
        with _as_unavailable(), contextlib.suppress(AlreadyExistsError):
            await obstore.put_async(self._store, key, data, mode="create", use_multipart=False)
            return True
        return False

    async def read(self, key: str) -> bytes | None:
        with contextlib.suppress(IntegrityError):
            return b"".join([chunk async for chunk in self.stream(key, 0)])
        return None

    async def stream(self, key: str, first: int) -> AsyncGenerator[bytes]:
        """A read that fails continues where it was, unless no bytes have come since."""
        etag, is_whole = None, False
        with _as_unavailable():
            while not is_whole:
                result, start = await self._get(key, first), first
                if etag not in (None, result.meta["e_tag"]):
                    raise Unavailable(f"{key} was replaced while it was read")
                etag, pieces, began = result.meta["e_tag"], list[bytes](), time.monotonic()
                try:
                    async for piece in result.stream(min_chunk_size=PIECE):
                        first += len(piece)
                        pieces.append(piece)
                        waited = time.monotonic() - began
                        if len(pieces) >= CHUNK // PIECE or waited >= MAX_STREAM_DELAY_S:
                            yield b"".join(pieces)
                            pieces, began = [], time.monotonic()
                    is_whole = True
                except BaseError:
                    if first == start:
                        raise
                if pieces:
                    yield b"".join(pieces)

    async def _get(self, key: str, first: int) -> Any:
        # Of no bytes there is no range.
        options: Any = {"range": {"offset": first}} if first else {}
        try:
            return await obstore.get_async(self._store, key, options=options)
        except (NotFoundError, FileNotFoundError) as error:
            raise IntegrityError(f"{key} is not in the store") from error

    async def size(self, key: str) -> int | None:
        with _as_unavailable(), contextlib.suppress(NotFoundError, FileNotFoundError):
            return (await obstore.head_async(self._store, key))["size"]
        return None

    async def keys(self, prefix: str) -> list[str]:
        return [each.key for each in await self.entries(prefix)]

    async def entries(self, prefix: str) -> list[StoredObject]:
        with _as_unavailable():
            pages = obstore.list(self._store, prefix=prefix)
            return [
                StoredObject(entry["path"], entry["size"], entry["last_modified"].timestamp())
                async for page in pages
                for entry in page
            ]

    async def folders(self) -> list[str]:
        with _as_unavailable():
            listed = await obstore.list_with_delimiter_async(self._store)
            return [each.rstrip("/") for each in listed["common_prefixes"]]

    async def unfinished(self, prefix: str) -> list[StoredObject]:
        return []

    async def delete(self, keys: list[str]) -> None:
        if not keys:
            return
        with _as_unavailable(), contextlib.suppress(NotFoundError, FileNotFoundError):
            await obstore.delete_async(self._store, keys)


def _open(settings: StoreSettings, silence: timedelta, retry_time: timedelta) -> Any:
    """Return a client whose requests fail after this silence."""
    options = _s3_options(settings) if settings.url.startswith("s3:") else {}
    options["client_options"] = {
        "allow_http": (settings.endpoint or "").startswith("http://"),
        "connect_timeout": STORE_CONNECT_TIMEOUT,
        "read_timeout": silence,
        "timeout": MAX_REQUEST_TIME,
    }
    return from_url(settings.url, retry_config=_retries(retry_time), **options)


def _retries(timeout: timedelta) -> Any:
    backoff = {"max_backoff": MAX_RETRY_PAUSE}
    return {"retry_timeout": timeout, "max_retries": MAX_STORE_ATTEMPTS, "backoff": backoff}


def _s3_options(settings: StoreSettings) -> dict[str, Any]:
    region = os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")
    config = {"region": region or DEFAULT_REGION}
    if settings.endpoint:
        config["endpoint"] = settings.endpoint
        config["virtual_hosted_style_request"] = "false"
    options: dict[str, Any] = {"config": config}
    access_key, secret_key = settings.access_key, settings.secret_key
    if access_key and secret_key:
        token = settings.session_token
        # Not in the config, where a session token of the environment would be added to them.
        options["credential_provider"] = lambda: {
            "access_key_id": access_key.get_secret_value(),
            "secret_access_key": secret_key.get_secret_value(),
            "token": token and token.get_secret_value(),
            "expires_at": None,
        }
    return options


def _trust(ca: str) -> None:
    """Have this process trust these certificates as well.

    The client takes certificates from the machine's file, or from the one that SSL_CERT_FILE names,
    and from nowhere else."""
    named = os.environ.get("SSL_CERT_FILE") or ssl.get_default_verify_paths().cafile
    certificates = Path(named).read_text() if named and Path(named).is_file() else ""
    if ca in certificates:
        return
    with tempfile.NamedTemporaryFile("w", suffix=".pem", delete=False) as file:
        file.write(f"{certificates}\n{ca}")
    atexit.register(Path(file.name).unlink, missing_ok=True)
    os.environ["SSL_CERT_FILE"] = file.name


@contextlib.contextmanager
def _as_unavailable() -> Iterator[None]:
    """Raise Unavailable if the store refuses a request."""
    try:
        yield
    except (PermissionDeniedError, UnauthenticatedError) as error:
        raise Unavailable(
            "the object store refuses these keys, or has not given them the right to do this "
            "(DIGENRL_S3_ACCESS_KEY, DIGENRL_S3_SECRET_KEY; `--run` of `digenrl keys "
            f"init` gives it for a run): {str(error).splitlines()[0][:200]}"
        ) from error
    except (BaseError, FileNotFoundError) as error:  # nothing is found where there is no bucket
        raise Unavailable(
            f"the object store did not answer as it should: {str(error).splitlines()[0][:200]}"
        ) from error
