"""Looks ahead beside the handling of events: the simulator on a thread, its result as an event."""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from services.scheduler.core.machine import HelpRefined, Input
from services.scheduler.core.state import Plan, State
from services.scheduler.planning.lookahead import look_ahead

AFFORDABLE = 0.02
"""Of a batch's time: a look-ahead that would take more is left out, for its share of a core is
missing elsewhere, and what it refines is over before it is known."""


@dataclass(slots=True)
class Horizon:
    """One look-ahead per batch at most."""

    plan: Plan
    tell: Callable[[Input], None]
    _opened: "asyncio.Queue[State]" = field(default_factory=asyncio.Queue)
    _last_seconds: float | None = None
    """That the last look-ahead took."""

    def note(self, before: State, after: State) -> None:
        """A batch has become the current one."""
        if after.batch is None or after.recovering or after.tag.controller.mode != "auto":
            return
        if before.batch is None or before.batch.index != after.batch.index:
            self._opened.put_nowait(after)

    async def run(self) -> None:
        while True:
            state = await self._opened.get()
            if not self._opened.empty() or not self._is_affordable(state):
                continue
            batch = state.batch
            assert batch is not None
            began = time.monotonic()
            groups = await asyncio.to_thread(look_ahead, self.plan, state, began)
            self._last_seconds = time.monotonic() - began
            if groups is not None:
                self.tell(HelpRefined(batch.index, groups))

    def _is_affordable(self, state: State) -> bool:
        measured = [record.seconds for record in state.tag.history if record.seconds]
        if self._last_seconds is None or not measured:
            return True
        return self._last_seconds <= AFFORDABLE * measured[-1]
