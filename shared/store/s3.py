"""Objects in an S3 bucket (Amazon, SeaweedFS, Ceph ...), through obstore.

Exclusive create is ``If-None-Match: *``; `StoreSettings` names the service and its credentials.
"""

from typing import TYPE_CHECKING

import obstore
from obstore.exceptions import AlreadyExistsError, BaseError, NotFoundError
from obstore.store import S3Store

from shared.errors import Unavailable

if TYPE_CHECKING:
    from shared.store.objects import StoreSettings

# A single request up to this size: conditional create works on whole puts only.
MAX_SINGLE_PUT = 64 * 1024 * 1024


class S3Backend:
    def __init__(self, bucket: str, prefix: str, settings: "StoreSettings") -> None:
        config: dict[str, str] = {"region": "us-east-1"}
        if settings.access_key and settings.secret_key:
            config["access_key_id"] = settings.access_key.get_secret_value()
            config["secret_access_key"] = settings.secret_key.get_secret_value()
        if settings.endpoint:
            config["endpoint"] = settings.endpoint
            config["virtual_hosted_style_request"] = "false"
        plain_http = (settings.endpoint or "").startswith("http://")
        self._store = S3Store(
            bucket,
            prefix=prefix or None,
            config=config,  # type: ignore[arg-type]
            client_options={"allow_http": plain_http, "timeout": "30s"},
        )

    async def write(self, key: str, data: bytes) -> None:
        try:
            await obstore.put_async(
                self._store, key, data, use_multipart=len(data) > MAX_SINGLE_PUT
            )
        except BaseError as error:
            raise _unavailable(error) from error

    async def create(self, key: str, data: bytes) -> bool:
        try:
            await obstore.put_async(self._store, key, data, mode="create", use_multipart=False)
        except AlreadyExistsError:
            return False
        except BaseError as error:
            raise _unavailable(error) from error
        return True

    async def read(self, key: str) -> bytes | None:
        try:
            found = await obstore.get_async(self._store, key)
            return bytes(await found.bytes_async())
        except (NotFoundError, FileNotFoundError):
            return None
        except BaseError as error:
            raise _unavailable(error) from error

    async def size(self, key: str) -> int | None:
        try:
            return (await obstore.head_async(self._store, key))["size"]
        except (NotFoundError, FileNotFoundError):
            return None
        except BaseError as error:
            raise _unavailable(error) from error

    async def keys(self, prefix: str) -> list[str]:
        try:
            pages = obstore.list(self._store, prefix=prefix)
            return [entry["path"] async for page in pages for entry in page]
        except BaseError as error:
            raise _unavailable(error) from error

    async def delete(self, keys: list[str]) -> None:
        if not keys:
            return
        try:
            await obstore.delete_async(self._store, keys)
        except (NotFoundError, FileNotFoundError):
            return
        except BaseError as error:
            raise _unavailable(error) from error


def _unavailable(error: Exception) -> Unavailable:
    return Unavailable(f"the object store did not answer as it should: {str(error)[:200]}")
