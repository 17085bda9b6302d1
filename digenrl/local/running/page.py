"""Starts the process that serves the run's page."""

import asyncio
import os
from contextlib import ExitStack, suppress
from pathlib import Path

from digenrl.api.live import LiveRun, client_of
from digenrl.api.run_history import RunHistory
from digenrl.local.connection import connect_client
from digenrl.local.limits import PAGE_LINK_TIMEOUT_S, PAGE_NICENESS
from digenrl.local.running.fleet import FolderOfRuns
from digenrl.local.running.home import create_home
from digenrl.local.runs import Run, in_progress, names_store
from digenrl.local.store import run_store
from digenrl.view.pages import View
from shared.errors import UserError
from shared.process.http_access import Access, Caller
from shared.process.service import freeze_gc, serve
from shared.process.settings import Endpoints, ServiceSettings
from shared.run.run_recipe import needed_recipe
from shared.store import open_store


def show(
    run: Run | None, folder: Path, settings: ServiceSettings, scheduler: str,
    token_file: Path | None, *, may_start: bool = False,
) -> None:  # fmt: skip
    """Serve the page of all runs, and of a run if one is named, until SIGINT or SIGTERM.

    `digenrl up` serves the page of its own run; for this run, only print a link to that page.

    Args:
        run: the named run; None: all runs are shown.
        folder: folder of all runs.
        scheduler: address of the scheduler's API; empty if the runs are over.
        token_file: file with an operator's token for this API.
        may_start: whether operators may start runs.

    Raises:
        UserError: if there is no such run, or if the run is in progress and ``scheduler`` is empty.
    """
    os.nice(PAGE_NICENESS)
    is_live = run is not None and not scheduler and in_progress(run.folder)
    if run is not None and is_live and (link := _link_to_live(run)) is not None:
        print(link)  # noqa: T201 -- a link to click
        return
    with ExitStack() as stack:
        history = None if run is None else RunHistory(stack.enter_context(run_store(run)), run.id)
        is_stored = names_store() if run is None else not run.is_local
        fleet = FolderOfRuns(folder, store=open_store(Endpoints().store) if is_stored else None)
        asyncio.run(_show(history, fleet, settings, scheduler, token_file, may_start=may_start))


def _link_to_live(run: Run) -> str | None:
    """Return a link to the page that `digenrl up` serves; None if it does not serve the page."""
    with suppress(UserError), connect_client(run, role="operator", service="page") as page:
        page.http.timeout = PAGE_LINK_TIMEOUT_S
        return f"{str(page.http.base_url).rstrip('/')}{page.make_code().path}"
    return None


async def _show(
    history: RunHistory | None, fleet: FolderOfRuns, settings: ServiceSettings, scheduler: str,
    token_file: Path | None, *, may_start: bool = False,
) -> None:  # fmt: skip
    if history is not None and not scheduler:
        await needed_recipe(history.store, history.run)
    listener = settings.listen(settings.host, settings.port)
    link_access = Access(cookie="digenrl-view", is_open=settings.open_api)
    access = settings.access(settings.run) if scheduler else link_access
    if scheduler:
        access.cookie += "-page"  # browsers send a cookie to all ports: the scheduler sets another
    async with client_of(scheduler, token_file) as client:
        if history is not None:
            live = LiveRun(scheduler.rstrip("/"), client)
            fleet.own = View(history, live, dict(os.environ), fleet.folder / history.run)
        if not scheduler:
            code = access.new_code(Caller("holder of the link", "operator"))
            sign_in = "" if access.is_open else f"sign-in?code={code}"
            print(f"{listener.url}/{sign_in}", flush=True)  # noqa: T201 -- a link to click
        freeze_gc()
        app = create_home(fleet, access, fleet.own, may_start=may_start)
        names = settings.allowed_hosts
        await serve(app, fleet.keep_up(), listener=listener, access=access, allowed_hosts=names)
