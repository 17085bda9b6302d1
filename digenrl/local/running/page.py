"""Starts the process that serves the run's page."""

import asyncio
import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path

from digenrl.api.live import LiveRun, client_of
from digenrl.api.run_history import RunHistory
from digenrl.local.connection import connect_client
from digenrl.local.limits import PAGE_LINK_TIMEOUT_S
from digenrl.local.running.fleet import FolderOfRuns
from digenrl.local.running.home import create_home
from digenrl.local.runs import Run, in_progress
from digenrl.local.store import run_store
from digenrl.view.pages import View
from shared.errors import UserError
from shared.process.http_access import Access, Caller
from shared.process.service import freeze_gc, serve
from shared.process.settings import ServiceSettings
from shared.run.run_recipe import needed_recipe
from shared.store import ObjectStore, open_store


def show(
    runs: Sequence[Run],
    folder: Path,
    settings: ServiceSettings,
    scheduler: str,
    token_file: Path | None,
    *,
    may_start: bool = False,
) -> None:
    """Serve the page of all runs, and of a run if one is named, until SIGINT or SIGTERM.

    `digenrl up` serves the page of its own run; for this run, only print a link to that page.

    Args:
        runs: the named run, followed by runs to compare it with; without one, all runs are shown.
        folder: folder of all runs.
        scheduler: address of the scheduler's API; empty if the runs are over.
        token_file: file with an operator's token for this API.
        may_start: whether operators may start runs.

    Raises:
        UserError: if there is no such run, or if the run is in progress and ``scheduler`` is empty.
    """
    is_alone = not scheduler and len(runs) == 1 and in_progress(runs[0].folder)
    if is_alone and (link := _link_to_live(runs[0])) is not None:
        print(link)  # noqa: T201 -- a link to click
        return
    with ExitStack() as stack:
        stores = [_open(stack, run) for run in runs]
        histories = [
            RunHistory(store, run.id) for (store, _), run in zip(stores, runs, strict=True)
        ]
        environment = stores[0][1] if stores else {}
        asyncio.run(
            _show(
                histories, folder, environment, settings, scheduler, token_file, may_start=may_start
            )
        )


def _link_to_live(run: Run) -> str | None:
    """Return a link to the page that `digenrl up` serves; None if it does not serve the page."""
    with suppress(UserError), connect_client(run, role="operator", service="page") as page:
        page.http.timeout = PAGE_LINK_TIMEOUT_S
        return f"{str(page.http.base_url).rstrip('/')}{page.make_code().path}"
    return None


def _open(stack: ExitStack, run: Run) -> tuple[ObjectStore, dict[str, str]]:
    """Open a run's store, and start the store of an ended local run until ``stack`` is closed.

    Returns:
        The store, and the environment variables for connecting to it.
    """
    stack.enter_context(run_store(run))
    return open_store(ServiceSettings(run=run.id).store), dict(os.environ)


async def _show(
    histories: Sequence[RunHistory],
    folder: Path,
    environment: Mapping[str, str],
    settings: ServiceSettings,
    scheduler: str,
    token_file: Path | None,
    *,
    may_start: bool = False,
) -> None:
    for history in histories:
        if not scheduler:
            await needed_recipe(history.store, history.run)
    listener = settings.listen(settings.host, settings.port)
    link_access = Access(cookie="digenrl-view", is_open=settings.open_api)
    access = settings.access(settings.run) if scheduler else link_access
    if scheduler:
        access.cookie += "-page"  # browsers send a cookie to all ports: the scheduler sets another
    async with client_of(scheduler, token_file) as client:
        own = None
        if histories:
            live = LiveRun(scheduler.rstrip("/"), client)
            own_folder = folder / histories[0].run
            own = View(histories[0], live, tuple(histories[1:]), environment, own_folder)
        fleet = FolderOfRuns(folder, own)
        if not scheduler:
            code = access.new_code(Caller("holder of the link", "operator"))
            sign_in = "" if access.is_open else f"sign-in?code={code}"
            print(f"{listener.url}/{sign_in}", flush=True)  # noqa: T201 -- a link to click
        freeze_gc()
        await serve(
            create_home(fleet, access, own, may_start=may_start),
            fleet.keep_up(),
            listener=listener,
            access=access,
            allowed_hosts=settings.allowed_hosts,
        )
