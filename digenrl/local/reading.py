"""Reads a run by its API: from its services while it is in progress, otherwise from its store, by
the same routes in this process."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import httpx

from digenrl.local import address
from digenrl.local.runs import Run, in_progress
from digenrl.local.store import run_store
from shared.store import ObjectStore, open_store

if TYPE_CHECKING:
    from digenrl.client import Client
    from shared.process.http_access import Role


class RunReader(NamedTuple):
    client: "Client"
    is_live: bool
    """Whether the run is in progress."""


class InProcessTransport(httpx.BaseTransport):
    """Answers requests by the routes of a run that is over, without a server."""

    def __init__(self, store: ObjectStore, run: str) -> None:
        from fastapi import FastAPI

        from digenrl.api.front import api_routes
        from digenrl.api.live import LiveRun
        from digenrl.api.run_history import RunHistory

        app, history = FastAPI(), RunHistory(store, run)
        app.include_router(
            api_routes(store, run, LiveRun("", httpx.AsyncClient(trust_env=False)), history)
        )
        self._app = httpx.ASGITransport(app)

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        return asyncio.run(self._answer(request))

    async def _answer(self, request: httpx.Request) -> httpx.Response:
        answer = await self._app.handle_async_request(request)
        content = await answer.aread()
        return httpx.Response(answer.status_code, headers=answer.headers, content=content)


def stored_client(store: ObjectStore, run: str) -> "Client":
    """Return a client of a run that is over.

    Raises:
        UserError: if the store holds no such run.
    """
    from digenrl.checked_client import CheckedClient
    from shared.run.run_recipe import needed_recipe

    asyncio.run(needed_recipe(store, run))
    return CheckedClient(
        httpx.Client(
            base_url="http://store", transport=InProcessTransport(store, run), trust_env=False
        )
    )


@contextmanager
def reading(
    run: Run,
    scheduler: str = "",
    token_file: Path | None = None,
    *,
    role: "Role" = "viewer",
    of: address.Service = "page",
) -> Iterator[RunReader]:
    """Yield a client of a run, as `client_of` does of one in progress.

    Raises:
        UserError: if the run is in progress and does not answer, or there is no such run.
    """
    from shared.process.settings import ServiceSettings
    from shared.telemetry import quiet_logs

    quiet_logs()
    if scheduler or in_progress(run.folder):
        with address.connect_client(run, scheduler, token_file, role=role, of=of) as client:
            yield RunReader(client, is_live=True)
        return
    with run_store(run):
        store = open_store(ServiceSettings(run=run.id).store)
        yield RunReader(stored_client(store, run.id), is_live=False)
