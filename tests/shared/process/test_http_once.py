"""A request with a key is done once."""

from typing import Any

import pytest

from shared.process import http_once
from shared.process.http_api import Refused


def test_a_request_that_is_under_way_is_not_begun_again() -> None:
    once = http_once.Once()
    assert once.begin("ann", "k", b"pause") is None
    with pytest.raises(Refused, match="409"):
        once.begin("ann", "k", b"pause")


async def test_what_a_service_could_not_do_may_be_asked_again() -> None:
    once, said = http_once.Once(), []

    async def broken(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 503})

    async def send(message: Any) -> None:
        said.append(message)

    async def receive() -> dict[str, Any]:
        return {"type": "http.disconnect"}

    assert once.begin("ann", "k", b"pause") is None
    await once.do("ann", "k", broken, {}, receive, send)
    assert once.begin("ann", "k", b"pause") is None and said
