"""Connects to the API of a run: of its services while it is in progress, otherwise the same routes
in this process, over its store."""

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import httpx

from digenrl.local.limits import MAX_READ_VERSIONS, PAGE_ANSWER_S
from digenrl.local.runs import Run, Service, in_progress, last_address, read_progress
from digenrl.local.store import run_store
from shared.errors import UserError
from shared.store import ObjectStore

if TYPE_CHECKING:
    from digenrl.api.client import Client
    from digenrl.reading.reading import RunReading
    from shared.process.http_access import Role

T = TypeVar("T")


class Connection(NamedTuple):
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

        app, nobody = FastAPI(), LiveRun("", httpx.AsyncClient(trust_env=False))
        app.include_router(api_routes(RunHistory(store, run), nobody))
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
    from digenrl.api.checked_client import CheckedClient
    from shared.run.run_recipe import needed_recipe

    asyncio.run(needed_recipe(store, run))
    return CheckedClient(
        httpx.Client(
            base_url="http://store", transport=InProcessTransport(store, run), trust_env=False
        )
    )


def connect_client(
    run: Run,
    scheduler: str = "",
    token_file: Path | None = None,
    *,
    role: "Role" = "viewer",
    service: Service = "scheduler",
) -> "Client":
    """Return a client of a run: of the address that is given, or of the run of `digenrl up`.

    Args:
        token_file: file with a token; None: DIGENRL_API_TOKEN, or for a run of `digenrl up` the
            token of ``role`` in its folder.

    Raises:
        UserError: if its address is unknown, or the file cannot be read.
    """
    from digenrl.api.checked_client import CheckedClient
    from digenrl.local.secrets.tokens import KEYS

    folder = run.folder
    address = scheduler or (last_address(folder, service) if not run.store_url else "")
    if not address:
        raise UserError(
            f"--scheduler: {run.name} is no run of `digenrl up`; name the address of the run's "
            f"{'page' if service == 'page' else 'scheduler'}"
        )
    now = read_progress(folder)
    if not scheduler and run.is_local and (now.state == "reporting" or not in_progress(folder)):
        from digenrl.local.start import resume_hint

        is_over = now.state in ("finished", "reporting")
        more = f"`{run.command('status')}` shows it" if is_over else resume_hint(folder)
        raise UserError(f"RUN: {run.name} is not in progress: {now}; {more}")
    own = folder / KEYS / f"{role}.token"
    if token_file is None and not scheduler and own.is_file():
        token_file = own
    return CheckedClient.at(address, token=_read_token(token_file))


def _read_token(file: Path | None) -> str:
    try:
        return "" if file is None else file.read_text().strip()
    except OSError as error:
        raise UserError(f"--token-file: {file}: {error.strerror}") from error


@contextmanager
def connect(
    run: Run,
    scheduler: str = "",
    token_file: Path | None = None,
    *,
    role: "Role" = "viewer",
    services: tuple[Service, ...] = ("page",),
) -> Iterator[Connection]:
    """Yield a client of a run, as `connect_client` does of one in progress.

    Args:
        services: which of its services may answer, in this order; otherwise its store does.

    Raises:
        UserError: if a service that was named does not answer, or there is no such run.
    """
    from shared.telemetry import quiet_logs

    quiet_logs()
    with ExitStack() as stack:
        for service in services:
            client = _live_client(stack, run, scheduler, token_file, role, service)
            if client is not None:
                client.http.timeout = (
                    client.http.timeout if service == services[-1] else PAGE_ANSWER_S
                )
                yield Connection(client, is_live=True)
                return
        is_read = read_progress(run.folder).state == "reporting"
        store = stack.enter_context(run_store(run, reads=is_read))
        yield Connection(stored_client(store, run.id), is_live=False)


def _live_client(
    stack: ExitStack,
    run: Run,
    scheduler: str,
    token_file: Path | None,
    role: "Role",
    service: Service,
) -> "Client | None":
    """Return a client of a run in progress; None if this service of the run does not answer.

    Raises:
        UserError: if the one that was named does not answer, or refuses.
    """
    from digenrl.api.client import NoAnswer, Refused

    is_known = (
        in_progress(run.folder) and read_progress(run.folder).state != "reporting"
        if run.is_local
        else not run.store_url and last_address(run.folder, service)
    )
    if not (scheduler or is_known):
        return None
    client = connect_client(run, scheduler, token_file, role=role, service=service)
    stack.enter_context(client)
    try:
        answer = client.get_run()
    except (NoAnswer, Refused):
        if scheduler:
            raise
        return None
    is_this = bool(scheduler) or answer.run == run.id  # another run may have the port now
    return client if is_this else None


def read_run(connection: Connection) -> "RunReading":
    """Return the reading of a run by its API.

    Raises:
        NoAnswer: if it does not answer.
        Refused: if it refuses.
    """
    from digenrl.reading.facts import MAX_LETTERS, USAGE_BATCHES, RunFacts, StepFacts
    from digenrl.reading.reading import read
    from shared.recipe.recipe import Recipe
    from shared.run.usage import BatchUsage

    client = connection.client
    run = client.get_run()
    recipe = _known(client.get_recipe)
    batches = {each.batch: each for each in client.list_batches(MAX_READ_VERSIONS)}
    usage = [
        _known(lambda batch=batch: client.get_usage(batch))  # type: ignore[misc]
        for batch in range(max(0, run.step - USAGE_BATCHES), run.step)
    ]
    return read(RunFacts(
        run=run, is_live=connection.is_live, at=time.time(), load=client.get_load(),
        workers=client.list_workers(), tag=client.get_tag().mode,
        letters=client.list_dead_letters("all", MAX_LETTERS),
        recipe=None if recipe is None else Recipe.model_validate(recipe.recipe),
        steps=[
            StepFacts(
                each.version, each.weights_digest,
                *((commit.metrics, [*commit.staleness.items()])
                  if (commit := batches.get(each.version - 1)) else ({}, ())),
            )
            for each in reversed(client.list_versions(MAX_READ_VERSIONS))
        ],
        usage=[BatchUsage.model_validate(each.model_dump()) for each in usage if each is not None],
        evaluations=(_known(client.list_evaluations) or [])[::-1],
    ))  # fmt: skip


def _known(ask: Callable[[], T]) -> T | None:
    """Return an answer; None from a service that does not have it."""
    from digenrl.api.client import Refused

    try:
        return ask()
    except Refused:
        return None
