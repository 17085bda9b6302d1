"""A real server of routes on a free port, and a reader of server-sent events."""

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

import httpx
import uvicorn
from fastapi import APIRouter, FastAPI

from shared.process.http_access import Access
from shared.process.http_api import add_problems
from shared.process.http_guard import Guard, own_names


class Event(NamedTuple):
    id: str
    name: str
    data: Any


def app_of(routes: APIRouter) -> FastAPI:
    app = FastAPI()
    add_problems(app)
    app.include_router(routes)
    return app


@asynccontextmanager
async def serving(routes: APIRouter, access: Access) -> AsyncIterator[str]:
    """Yield the address; the server ends at once, whoever reads."""
    taken = socket.create_server(("127.0.0.1", 0), backlog=512)
    guard = Guard(app_of(routes), own_names("127.0.0.1"), access=access)
    server = uvicorn.Server(
        uvicorn.Config(guard, log_level="critical", lifespan="off", timeout_graceful_shutdown=0)
    )
    server.capture_signals = contextlib.nullcontext  # type: ignore[method-assign,assignment]
    task = asyncio.create_task(server.serve(sockets=[taken]))
    try:
        yield f"http://127.0.0.1:{taken.getsockname()[1]}"
    finally:
        server.should_exit = server.force_exit = True
        for transport in list(server.server_state.connections):
            transport.transport.abort()
        await task
        taken.close()


async def events_of(client: httpx.AsyncClient, url: str, after: str) -> AsyncIterator[Event]:
    """Yield events, after one that is known, until the connection ends."""
    asked = {"after": after} if after else {}
    async with client.stream("GET", f"{url}/v1/events", params=asked) as answer:
        answer.raise_for_status()
        fields: dict[str, str] = {}
        async for line in answer.aiter_lines():
            if line:
                name, _, value = line.partition(": ")
                fields[name] = value
            elif "event" in fields:
                yield Event(fields.get("id", ""), fields["event"], json.loads(fields["data"]))
                fields = {}
