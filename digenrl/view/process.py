"""Starts the process that serves the run's page."""

import asyncio
import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import httpx

from digenrl.local.address import address_of
from digenrl.local.runs import Run
from digenrl.local.store import store_of
from digenrl.local.tokens import KEYS
from digenrl.view.history import RunHistory
from digenrl.view.live import LiveRun, client_of
from digenrl.view.server import View, create_app
from shared.process.http_access import Access, Caller
from shared.process.service import freeze_gc, serve
from shared.process.settings import ServiceSettings
from shared.run.run_recipe import needed_recipe
from shared.store import ObjectStore, open_store

ASK_S = 2.0


@dataclass(frozen=True, slots=True)
class Wanted:
    """Says which runs are to be shown, and how to reach their scheduler."""

    runs: Sequence[Run]
    """The run, and others to compare it with."""
    settings: ServiceSettings
    scheduler: str = ""
    """Address of the scheduler's API; empty if the runs are over."""
    token_file: Path | None = None
    """File with an operator's token for it."""


def show(wanted: Wanted) -> None:
    """Serve the page until SIGINT or SIGTERM; of a run that `digenrl up` serves the page of, print
    a link to it.

    Raises:
        UserError: if there is no such run, or it is in progress and the address of its scheduler is
            not given.
    """
    first = wanted.runs[0]
    is_alone = not wanted.scheduler and len(wanted.runs) == 1 and not first.store_url
    if is_alone and (link := _link_of_live(first.folder)) is not None:
        print(link)  # noqa: T201 -- a link to click
        return
    with ExitStack() as stack:
        opened = [_open(stack, run) for run in wanted.runs]
        asyncio.run(_show(wanted, [store for store, _ in opened], opened[0][1]))


def _link_of_live(folder: Path) -> str | None:
    """Return a link to the page that `digenrl up` serves of a run in progress; None if it does
    not."""
    address = address_of(folder, "page")
    token = folder / KEYS / "operator.token"
    if not address or not token.is_file():
        return None
    headers = {"authorization": f"Bearer {token.read_text().strip()}"}
    try:
        answer = httpx.post(f"{address}/v1/codes", headers=headers, verify=False, timeout=ASK_S)
        return f"{address}{answer.raise_for_status().json()['path']}"
    except httpx.HTTPError:
        return None


def _open(stack: ExitStack, run: Run) -> tuple[ObjectStore, dict[str, str]]:
    """Open a run's store; start it if it is one of `digenrl up` that has ended. Return it with the
    environment in which another process finds it."""
    stack.enter_context(store_of(run))
    return open_store(ServiceSettings(run=run.id).store), dict(os.environ)


async def _show(
    wanted: Wanted, stores: Sequence[ObjectStore], environment: Mapping[str, str]
) -> None:
    settings = wanted.settings
    ids = [run.id for run in wanted.runs]
    for store, name in zip(stores, ids, strict=True):
        if not wanted.scheduler:
            await needed_recipe(store, name)
    listener = settings.listen(settings.host, settings.port)
    of_link = Access(cookie="digenrl-view", is_open=settings.open_api)
    access = settings.access(settings.run) if wanted.scheduler else of_link
    first, *others = (RunHistory(*each) for each in zip(stores, ids, strict=True))
    async with client_of(wanted.scheduler, wanted.token_file) as client:
        live = LiveRun(wanted.scheduler.rstrip("/"), client)
        app = create_app(View(first, live, tuple(others), environment), access)
        if not wanted.scheduler:
            code = access.new_code(Caller("whoever has the link", "operator"))
            sign_in = "" if access.is_open else f"sign-in?code={code}"
            print(f"{listener.url}/{sign_in}", flush=True)  # noqa: T201 -- a link to click
        freeze_gc()
        await serve(
            app, _wait(), listener=listener, access=access, allowed_hosts=settings.allowed_hosts
        )


async def _wait() -> None:
    await asyncio.Event().wait()
