"""Opens the runs of a folder for one page: what each has stored, and its scheduler if it runs."""

import asyncio
import os
import sys
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from digenrl.api.live import LiveRun, client_of
from digenrl.api.run_history import RunHistory
from digenrl.api.status import read_run
from digenrl.local.limits import MAX_OPEN_RUNS, OPEN_RUN_IDLE_S, STORED_RUNS_S
from digenrl.local.running.run_cards import CARD_FOLDER, SUMMARY_JSON, RunCard, card_of, summarise
from digenrl.local.runs import RECIPE_JSON, Run, in_progress, last_address, run_in_folder, runs_in
from digenrl.local.store import local_store
from digenrl.view.pages import View
from shared.errors import Unavailable, UserError
from shared.process.settings import Endpoints
from shared.recipe.recipe import load_recipe
from shared.store import ObjectStore, open_store

Value = bool | int | float | str | None


@dataclass(slots=True)
class OpenRun:
    """A run whose store can be read."""

    view: View
    stack: ExitStack
    used: float = 0.0
    """Time of the newest request, by the monotonic clock."""
    requests: int = 0
    """Requests in progress, which need the store."""

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
    store: ObjectStore | None = None
    """Store with runs that have no folder here."""
    refusal: str = ""
    """Reason why the store does not list its runs."""
    _open: dict[str, OpenRun] = field(default_factory=dict)
    _lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    _unsummed: list[str] = field(default_factory=list)
    """Runs whose cards have no final summary."""
    _failed: dict[str, str] = field(default_factory=dict)
    """Moments of runs that could not be summed up."""
    _stored: dict[str, tuple[RunCard, Mapping[str, bytes]] | None] = field(default_factory=dict)
    """Cards and their pictures of the store's folders; None: it is not read, or holds no run."""
    unread: list[str] = field(default_factory=list)
    """Folders of the store whose cards are read next."""
    _listed: float = float("-inf")

    async def cards(self) -> Sequence[RunCard]:
        """Return all runs, the newest first."""
        cards = await asyncio.to_thread(lambda: [card_of(each) for each in runs_in(self.folder)])
        self._unsummed = [
            each.name for each in cards
            if each.moment not in (each.summary.made_at, self._failed.get(each.name))
        ]  # fmt: skip
        here = {each.name: each for each in cards}
        stored = {name: each[0] for name, each in (await self._list_store()).items() if each}
        if self.own is not None and (name := self.own.history.run) not in here:
            card = await _card_of(self.own)
            card.summary = stored.get(name, card).summary
            here = {name: card, **here}
        return [*(stored | here).values()]

    async def _list_store(self) -> Mapping[str, tuple[RunCard, Mapping[str, bytes]] | None]:
        """Return the folders of the store, and the cards that were read."""
        if self.store is not None and time.monotonic() - self._listed >= STORED_RUNS_S:
            self._listed = time.monotonic()
            try:
                names, self.refusal = await self.store.folders(), ""
            except Unavailable as error:
                names, self.refusal = [], str(error)
            self._stored = {name: self._stored.get(name) for name in names}
            stored = self._stored.items()
            self.unread = [k for k, each in stored if each is None or each[0].state != "finished"]
        return self._stored

    async def _read_stored(self) -> None:
        """Read the card and the pictures of a run that has no folder here."""
        name = self.unread.pop(0)
        with suppress(Exception):  # another list leads to another attempt
            async with self.keep_open(name) as view:
                if view is not None and (card := await _card_of(view)).steps:
                    card.summary, pictures = await summarise(view.history)
                    card.summary.made_at = card.moment
                    self._stored[name] = card, pictures

    def picture(self, name: str, kind: str) -> bytes | None:
        """Return a picture of a run's card; None if the run has none yet."""
        if (stored := self._stored.get(name)) and kind in stored[1]:
            return stored[1][kind]
        file = self.folder / name / CARD_FOLDER / kind
        return file.read_bytes() if file.is_file() else None

    async def open(self, name: str) -> View | None:
        """Return a run, the same object until it ends or starts again; None: the folder lacks it.
        Raises Unavailable if its store does not answer."""
        if self.own is not None and name == self.own.history.run:
            return self.own
        run = run_in_folder(name, self.folder)
        if run is None and name in await self._list_store():
            run = Run(name, name, self.folder / name)
        if run is None:
            return None
        async with self._lock:
            scheduler = last_address(run.folder) if in_progress(run.folder) else ""
            if name in self._open and self._open[name].view.live.url != scheduler:
                await self._open.pop(name).close()
            if name not in self._open:
                self._open[name] = await asyncio.to_thread(_opened, run, scheduler)
                await self._close_unused(len(self._open) - MAX_OPEN_RUNS)
            self._open[name].used = time.monotonic()
            return self._open[name].view

    @asynccontextmanager
    async def keep_open(self, name: str) -> AsyncIterator[View | None]:
        """Open a run, and keep it open while a request reads it."""
        view, run = await self.open(name), self._open.get(name)
        if run is None:
            yield view
            return
        run.requests += 1
        try:
            yield view
        finally:
            run.requests, run.used = run.requests - 1, time.monotonic()

    async def keep_up(self) -> None:
        """Sum up runs for their cards, and close runs without readers, until it is cancelled."""
        try:
            while True:
                for name in self._unsummed[:1]:
                    await self._sum_up(name)
                self._unsummed = self._unsummed[1:]
                if self.unread:
                    await self._read_stored()
                await asyncio.sleep(0 if self._unsummed or self.unread else 1)
                async with self._lock:
                    late = time.monotonic() - OPEN_RUN_IDLE_S
                    runs = self._open.values()
                    await self._close_unused(sum(r.used < late and not r.requests for r in runs))
        finally:
            for each in self._open.values():
                await each.close()

    async def _sum_up(self, name: str) -> None:
        """Store the summary and the pictures of a run."""
        folder, was_open = self.folder / name, name in self._open
        moment, card = card_of(folder).moment, folder / CARD_FOLDER
        try:
            if (view := await self.open(name)) is None:
                return
            summary, pictures = await summarise(view.history)
            card.mkdir(exist_ok=True)
            for kind, data in pictures.items():
                (card / kind).write_bytes(data)
            summary.made_at = moment
            (card / SUMMARY_JSON).write_text(summary.model_dump_json())
        except Exception:
            self._failed[name] = moment
        async with self._lock:
            if not was_open and name in self._open and not self._open[name].view.live.url:
                await self._open.pop(name).close()

    async def _close_unused(self, number: int) -> None:
        """Close a number of runs without requests, those that were requested longest ago."""
        idle = [name for name, each in self._open.items() if not each.requests]
        for name in sorted(idle, key=lambda name: self._open[name].used)[: max(0, number)]:
            await self._open.pop(name).close()

    def copy(self, name: str, new: str, changes: Mapping[str, Value]) -> Path:
        """Write a run's recipe with other values of keys, and return its file. Raises UserError if
        a value is wrong, or the file exists."""
        file = self.folder / f"{new}.json"
        if file.exists() or (self.folder / new).exists():
            raise UserError(f"name: {new} exists; choose another")
        recipe = load_recipe(self.folder / name / RECIPE_JSON, {**changes, "run.name": new})
        file.write_text(recipe.model_dump_json(indent=1))
        return file

    def command(self, name: str) -> list[str]:
        """Return the command line that resumes a run, or starts the recipe of this name."""
        folder, words = self.folder / name, ["--runs", str(self.folder)]
        if (folder / RECIPE_JSON).is_file():
            return ["up", str(folder / RECIPE_JSON), "--run", str(folder), "--resume", *words]
        return ["up", f"{folder}.json", *words]

    async def start(self, name: str) -> None:
        """Start or resume a run in a process of its own; raises UserError with the reason if the
        run does not start."""
        async with self._lock:
            if name in self._open:
                await self._open.pop(name).close()
        ours = {key: each for key, each in os.environ.items() if not key.startswith("DIGENRL_")}
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-P", "-m", "digenrl", *self.command(name), "--detach", env=ours,
            stdin=-3, stdout=-1, stderr=-2,
        )  # fmt: skip
        output, _ = await process.communicate()
        if process.returncode:
            raise UserError(output.decode(errors="replace").strip().removeprefix("digenrl: "))


def _opened(run: Run, scheduler: str) -> OpenRun:
    """Open a run; ``scheduler`` is the address of its scheduler, empty if it has ended."""
    stack = ExitStack()
    named = {"DIGENRL_STORE_URL": run.store_url} if run.store_url else {}
    if run.is_local:
        named = stack.enter_context(local_store(run, reads=True))
    settings = {name.removeprefix("DIGENRL_").lower(): value for name, value in named.items()}
    history = RunHistory(open_store(Endpoints.model_validate(settings).store), run.id)
    token = run.folder / "keys" / "operator.token" if scheduler else None
    live = LiveRun(scheduler, client_of(scheduler, token))
    view = View(history, live, environment={**os.environ, **named}, folder=run.folder)
    return OpenRun(view, stack)


async def _card_of(view: View) -> RunCard:
    """Return the card of a run that has no folder here. One without a scheduler may be in progress
    elsewhere."""
    now = await read_run(view.history, view.live)
    state = "unfinished" if now.phase == "stopped" and not view.live.url else now.phase
    return RunCard(
        name=view.history.run, state=state, step=now.step, steps=now.steps,
        reward=now.metrics.get("reward_mean"), age_seconds=None,
    )  # fmt: skip
