"""Refines the controller's choice of TAG groups by simulation, in a thread of its own."""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from services.scheduler.core.inputs import MachineInput, TagRefined
from services.scheduler.core.state import Plan, State
from services.scheduler.sim.lookahead import look_ahead

MAX_SHARE_OF_BATCH = 0.02
"""Share of a batch's time that a look-ahead may take. A longer one is left out: its core is missing
elsewhere, and what it refines is over before it is known."""


@dataclass(slots=True)
class TagRefiner:
    """One look-ahead per batch at most."""

    plan: Plan
    tell: Callable[[MachineInput], None]
    _opened: "asyncio.Queue[State]" = field(default_factory=asyncio.Queue)
    _last_seconds: float | None = None
    """Seconds that the last look-ahead took."""

    def record(self, before: State, after: State) -> None:
        """Note that a batch has become the current one."""
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
                self.tell(TagRefined(batch.index, groups))

    def _is_affordable(self, state: State) -> bool:
        measured = [record.seconds for record in state.tag.history if record.seconds]
        if self._last_seconds is None or not measured:
            return True
        return self._last_seconds <= MAX_SHARE_OF_BATCH * measured[-1]
