"""Starts the process that serves the run's page."""

import asyncio
import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path

from digenrl.api.live import LiveRun, client_of
from digenrl.api.run_history import RunHistory
from digenrl.local import address
from digenrl.local.runs import Run, in_progress
from digenrl.local.store import run_store
from digenrl.view.server import View, create_app
from shared.errors import UserError
from shared.process.http_access import Access, Caller
from shared.process.service import freeze_gc, serve
from shared.process.settings import ServiceSettings
from shared.run.run_recipe import needed_recipe
from shared.store import ObjectStore, open_store

STATUS_TIMEOUT_S = 2.0


def show(
    runs: Sequence[Run], settings: ServiceSettings, scheduler: str, token_file: Path | None
) -> None:
    """Serve the page until SIGINT or SIGTERM; of a run that `digenrl up` serves the page of, print
    a link to it.

    Args:
        runs: the run, and others to compare it with.
        scheduler: address of the scheduler's API; empty if the runs are over.
        token_file: file with an operator's token for it.

    Raises:
        UserError: if there is no such run, or it is in progress and the address of its scheduler is
            not given.
    """
    is_alone = not scheduler and len(runs) == 1 and in_progress(runs[0].folder)
    if is_alone and (link := _link_of_live(runs[0])) is not None:
        print(link)  # noqa: T201 -- a link to click
        return
    with ExitStack() as stack:
        opened = [_open(stack, run) for run in runs]
        histories = [
            RunHistory(store, run.id) for (store, _), run in zip(opened, runs, strict=True)
        ]
        asyncio.run(_show(histories, opened[0][1], settings, scheduler, token_file))


def _link_of_live(run: Run) -> str | None:
    """Return a link to the page that `digenrl up` serves of a run in progress; None if it does
    not."""
    with suppress(UserError), address.connect_client(run, role="operator", of="page") as page:
        page.http.timeout = STATUS_TIMEOUT_S
        return f"{str(page.http.base_url).rstrip('/')}{page.make_code().path}"
    return None


def _open(stack: ExitStack, run: Run) -> tuple[ObjectStore, dict[str, str]]:
    """Open a run's store; start it if it is one of `digenrl up` that has ended. Return it with the
    environment in which another process finds it."""
    stack.enter_context(run_store(run))
    return open_store(ServiceSettings(run=run.id).store), dict(os.environ)


async def _show(
    histories: Sequence[RunHistory],
    environment: Mapping[str, str],
    settings: ServiceSettings,
    scheduler: str,
    token_file: Path | None,
) -> None:
    for each in histories:
        if not scheduler:
            await needed_recipe(each.store, each.run)
    listener = settings.listen(settings.host, settings.port)
    of_link = Access(cookie="digenrl-view", is_open=settings.open_api)
    access = settings.access(settings.run) if scheduler else of_link
    if scheduler:
        access.cookie += "-page"  # browsers send cookies to every port: the scheduler has its own
    first, *others = histories
    async with client_of(scheduler, token_file) as client:
        live = LiveRun(scheduler.rstrip("/"), client)
        app = create_app(View(first, live, tuple(others), environment), access)
        if not scheduler:
            code = access.new_code(Caller("whoever has the link", "operator"))
            sign_in = "" if access.is_open else f"sign-in?code={code}"
            print(f"{listener.url}/{sign_in}", flush=True)  # noqa: T201 -- a link to click
        freeze_gc()
        await serve(
            app, _wait(), listener=listener, access=access, allowed_hosts=settings.allowed_hosts
        )


async def _wait() -> None:
    await asyncio.Event().wait()
