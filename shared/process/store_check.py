"""Looks, when a scheduler starts, whether an object store is one that a run can trust."""

from urllib.parse import urlsplit

import httpx

from shared.errors import Unavailable, UserError
from shared.limits import STORE_CHECK_TIMEOUT_S
from shared.process.trust import trusted_with
from shared.store.objects import ObjectStore
from shared.store.settings import StoreSettings

PROBE = "created-once"
"""Name of the object by which a store shows that it creates one once."""


async def check_store(
    settings: StoreSettings, store: ObjectStore, key: str, *, may_be_open: bool
) -> None:
    """Look at a bucket; a folder is as its file system is.

    Args:
        key: an object that this check may make.
        may_be_open: whether a store without authentication is allowed.

    Raises:
        UserError: if it lets two writers create one object, or serves objects without
            authentication.
        Unavailable: if it does not answer.
    """
    if settings.url.startswith("file:"):
        return
    await store.create(key, b"1")
    if await store.create(key, b"2"):
        raise UserError(
            f"DIGENRL_STORE_URL: {settings.url} creates an object that is there already, so two "
            "trainers could both commit a step; take a server with conditional puts "
            "(If-None-Match), such as SeaweedFS 4.48"
        )
    if settings.endpoint is not None and not may_be_open:
        await _check_asks(settings, settings.endpoint)


async def _check_asks(settings: StoreSettings, endpoint: str) -> None:
    """Raises UserError if the store lists the bucket without a key."""
    bucket = urlsplit(settings.url).netloc
    url = f"{endpoint.rstrip('/')}/{bucket}"
    try:
        async with httpx.AsyncClient(
            verify=trusted_with(settings.ca), timeout=STORE_CHECK_TIMEOUT_S, trust_env=False
        ) as client:
            answer = await client.get(url, params={"list-type": "2", "max-keys": "1"})
    except httpx.HTTPError as error:
        raise Unavailable(f"DIGENRL_S3_ENDPOINT: {endpoint} does not answer: {error!r}") from error
    if answer.is_success:
        raise UserError(
            f"DIGENRL_S3_ENDPOINT: {endpoint} lists the bucket {bucket} without a key; give it "
            "users (`digenrl keys init` writes those for SeaweedFS), or set "
            "DIGENRL_OPEN_BROKERS=1 on a laptop"
        )
