"""Lists the runs of a store that have no folder on this host, for the page of all runs."""

import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

import httpx

from digenrl.api.live import LiveRun
from digenrl.api.run_history import RunHistory
from digenrl.api.status import read_run
from digenrl.local.limits import STORED_RUNS_S
from digenrl.local.running.run_cards import RunCard, summarise
from digenrl.view.pages import View
from shared.errors import DigenRLError
from shared.run.layout import epochs_folder
from shared.store import ObjectStore


@dataclass(slots=True)
class StoredRuns:
    store: ObjectStore
    refusal: str = ""
    """Reason why the store does not list its runs."""
    pictures: dict[str, Mapping[str, bytes]] = field(default_factory=dict)
    """Pictures of the cards by their names, for each run."""
    _cards: dict[str, RunCard | None] = field(default_factory=dict)
    """Cards by the names of the store's folders; None: the folder holds no run."""
    _begun: dict[str, float] = field(default_factory=dict)
    """Unix seconds of the start of runs."""
    _histories: dict[str, RunHistory] = field(default_factory=dict)
    """Histories of unfinished runs."""
    _unread: list[str] = field(default_factory=list)
    _listed: float = float("-inf")
    _no_scheduler: LiveRun = field(default_factory=lambda: LiveRun("", httpx.AsyncClient()))

    async def cards(self, here: Collection[str] = ()) -> list[RunCard]:
        """Return a card for each run but those ``here``; `read_next` reads what they show."""
        if time.monotonic() - self._listed >= STORED_RUNS_S:
            self._listed = time.monotonic()
            try:
                names, self.refusal = await self.store.folders(), ""
            except DigenRLError as error:
                names, self.refusal = [], str(error)
            names = [name for name in names if name not in here]
            self._cards = {name: self._cards.get(name, _unread(name)) for name in names}
            self._unread = [
                k for k, each in self._cards.items() if each and each.state != "finished"
            ]
        cards = [each for each in self._cards.values() if each is not None]
        for each in cards:
            begun = self._begun.get(each.name)
            each.age_seconds = None if begun is None else time.time() - begun
        return cards

    async def view(self, name: str) -> View | None:
        """Return what a run has stored; None if the store lists no such run."""
        is_listed = self._cards.get(name) or name in [each.name for each in await self.cards()]
        return View(self._history(name), self._no_scheduler) if is_listed else None

    def _history(self, name: str) -> RunHistory:
        return self._histories.setdefault(name, RunHistory(self.store, name))

    async def read_next(self) -> bool:
        """Read the card of one more run; return whether there was one."""
        if not self._unread:
            return False
        history = self._history(name := self._unread.pop(0))
        try:
            card = await card_of_view(View(history, self._no_scheduler))
            card.summary, self.pictures[name] = await summarise(history)
            epochs = await self.store.entries(epochs_folder(name))
        except Exception as error:
            self._cards[name] = _unread(name, str(error))
            return True
        if card.state == "stopped":
            card.state = "unfinished"  # it may be in progress elsewhere
        card.summary.made_at = card.moment
        if epochs:
            self._begun[name] = min(each.modified for each in epochs)
        self._cards[name] = None if history.recipe is None else card
        if history.recipe is None or card.state == "finished":
            del self._histories[name]
        return True


def _unread(name: str, reason: str | None = None) -> RunCard:
    return RunCard(
        name=name, state="unread", step=0, steps=None, reward=None, age_seconds=None,
        failure=reason, has_folder=False,
    )  # fmt: skip


async def card_of_view(view: View) -> RunCard:
    """Return the card of a run that has no folder here."""
    now = await read_run(view.history, view.live)
    return RunCard(
        name=view.history.run, state=now.phase, step=now.step, steps=now.steps,
        reward=now.metrics.get("reward_mean"), age_seconds=None, has_folder=False,
    )  # fmt: skip
