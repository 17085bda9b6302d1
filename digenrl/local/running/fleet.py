"""Opens the runs of a folder for one page: what each has stored, and its scheduler if it runs."""

import asyncio
import os
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from digenrl.api.live import LiveRun, client_of
from digenrl.api.run_history import RunHistory
from digenrl.local.limits import MAX_OPEN_RUNS, OPEN_RUN_IDLE_S
from digenrl.local.runs import (
    RECIPE_JSON,
    Run,
    in_progress,
    last_address,
    read_progress,
    run_in_folder,
    runs_in,
)
from digenrl.local.store import local_store
from digenrl.view.home import RunCard
from digenrl.view.pages import View
from shared.process.settings import Endpoints
from shared.store import open_store


@dataclass(slots=True)
class OpenRun:
    """A run whose store can be read."""

    view: View
    is_live: bool
    stack: ExitStack
    used: float = 0.0
    """Time of the newest request, by the monotonic clock."""

    async def close(self) -> None:
        """Stop its store, if it was started for the page."""
        await self.view.live.client.aclose()
        await asyncio.to_thread(self.stack.close)


@dataclass(slots=True)
class FolderOfRuns:
    """The runs of `digenrl up` in a folder, in progress or ended."""

    folder: Path
    own: View | None = None
    """The run that the process was started for."""
    _open: dict[str, OpenRun] = field(default_factory=dict)
    _lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def cards(self) -> Sequence[RunCard]:
        return await asyncio.to_thread(lambda: [_card(each) for each in runs_in(self.folder)])

    async def open(self, name: str) -> View | None:
        if self.own is not None and name == self.own.history.run:
            return self.own
        run = run_in_folder(name, self.folder) if "/" not in name else None
        if run is None or not run.is_local:
            return None
        async with self._lock:
            known, is_live = self._open.get(name), in_progress(run.folder)
            if known is not None and known.is_live != is_live:
                await self._open.pop(name).close()
                known = None
            if known is None:
                known = self._open[name] = await asyncio.to_thread(_opened, run, is_live=is_live)
                await self._close_unused(len(self._open) - MAX_OPEN_RUNS)
            known.used = time.monotonic()
        return known.view

    async def close_idle(self) -> None:
        """Close runs without readers, until it is cancelled; then close all."""
        try:
            while True:
                await asyncio.sleep(OPEN_RUN_IDLE_S / 4)
                async with self._lock:
                    late = time.monotonic() - OPEN_RUN_IDLE_S
                    await self._close_unused(sum(each.used < late for each in self._open.values()))
        finally:
            await self._close_unused(len(self._open))

    async def _close_unused(self, number: int) -> None:
        """Close a number of runs, those that were requested longest ago."""
        for name in sorted(self._open, key=lambda name: self._open[name].used)[: max(0, number)]:
            await self._open.pop(name).close()


def _opened(run: Run, *, is_live: bool) -> OpenRun:
    stack = ExitStack()
    named = stack.enter_context(local_store(run, reads=True))
    settings = {name.removeprefix("DIGENRL_").lower(): value for name, value in named.items()}
    history = RunHistory(open_store(Endpoints.model_validate(settings).store), run.id)
    scheduler = last_address(run.folder) if is_live else ""
    token = run.folder / "keys" / "operator.token" if is_live else None
    live = LiveRun(scheduler, client_of(scheduler, token))
    return OpenRun(View(history, live, environment={**os.environ, **named}), is_live, stack)


def _card(folder: Path) -> RunCard:
    now = read_progress(folder)
    return RunCard(
        name=folder.name, state=now.state, step=now.step, steps=now.steps, reward=now.reward,
        age_seconds=time.time() - (folder / RECIPE_JSON).stat().st_mtime,
    )  # fmt: skip
