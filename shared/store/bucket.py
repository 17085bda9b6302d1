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
"""Bytes of a part of a large object: a slow line sends it within `MAX_SILENCE`."""
PARTS_AT_ONCE = 2
MAX_SINGLE_PUT = PART * PARTS_AT_ONCE
DEFAULT_REGION = "us-east-1"


class BucketBackend:
    def __init__(self, settings: StoreSettings) -> None:
        """Raises UserError if a setting that the store needs is missing."""
        if settings.ca is not None:
            _trust(settings.ca)
        options: dict[str, Any] = {
            "client_options": {
                "allow_http": (settings.endpoint or "").startswith("http://"),
                "connect_timeout": STORE_CONNECT_TIMEOUT,
                "read_timeout": MAX_SILENCE,
                "timeout": MAX_REQUEST_TIME,
            }
        }
        if settings.url.startswith("s3:"):
            options |= _s3_options(settings)
        go_direct(settings.endpoint)
        try:
            self._store = from_url(settings.url, retry_config=_retries(MAX_RETRY_TIME), **options)
            self._parts = from_url(
                settings.url, retry_config=_retries(MAX_PART_RETRY_TIME), **options
            )
        except (BaseError, ValueError) as error:
            raise UserError(f"store_url: {settings.url!r} cannot be used: {error}") from error

    async def write(self, key: str, data: Content) -> None:
        in_parts = len(data) > MAX_SINGLE_PUT
        with _as_unavailable():
            await obstore.put_async(
                self._parts if in_parts else self._store,
                key,
                data,
                use_multipart=in_parts,
                chunk_size=PART,
                max_concurrency=PARTS_AT_ONCE,
            )

    async def write_unnamed(
        self, folder: str, data: Content, ref: Awaitable[ObjectRef], *, stays: bool = True
    ) -> None:
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

    async def unfinished(self, prefix: str) -> list[StoredObject]:
        return []

    async def delete(self, keys: list[str]) -> None:
        if not keys:
            return
        with _as_unavailable(), contextlib.suppress(NotFoundError, FileNotFoundError):
            await obstore.delete_async(self._store, keys)


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
            f"init` gives it for a run): {str(error)[:200]}"
        ) from error
    except (BaseError, FileNotFoundError) as error:  # nothing is found where there is no bucket
        raise Unavailable(
            f"the object store did not answer as it should: {str(error)[:200]}"
        ) from error
