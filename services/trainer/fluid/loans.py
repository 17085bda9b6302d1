"""Loans of a member's device: the scheduler lends it to generation, and calls it back (TAG).

Without loans a member trains when no fragment of the batch is left. With loans it generates only
while it is lent, and pieces come first. It comes back between two denoising steps, and keeps an
unfinished fragment for its next loan, while that version is in use.
"""

import asyncio
import time
from collections.abc import Callable, Collection
from typing import Literal

import structlog

from services.trainer import limits
from shared.devices.loan import Loan, apply, may_generate, tick
from shared.messages import subjects
from shared.messages.contracts import SetDevice
from shared.messages.workers import DeviceLoan
from shared.process.worker import WorkerContext
from shared.telemetry import LOAN_RETURN_SECONDS

NextWork = Literal["stale", "due", "piece", "early", "later"]
"""
stale   a fragment of a version that is not here any more: it goes back
due     a fragment of the batch that is trained from the version in use
piece   a piece of that batch, whose group is here
early   any other fragment of a version that is here
later   a fragment of a version that is not here yet: it waits
"""
WORK_ORDER: dict[bool | None, tuple[NextWork, ...]] = {
    None: ("stale", "due", "piece", "early"),
    True: ("stale", "piece", "due", "early"),
    False: ("stale", "piece"),
}

log = structlog.get_logger()


def next_work(waiting: Collection[NextWork], *, lent: bool | None) -> NextWork | None:
    """Return what a device does next; ``lent``: None if it generates without loans."""
    return next((work for work in WORK_ORDER[lent] if work in waiting), None)


class Loans:
    """Follows the loans of one device."""

    def __init__(
        self, context: WorkerContext, *, wake: Callable[[], None], give_back: Callable[[], None],
        are_used: bool,
    ) -> None:  # fmt: skip
        """``wake`` is called at each change, ``give_back`` when fragments are not to be kept."""
        self._bus, self._worker = context.bus, context.worker
        self._wake, self._give_back, self._are_used = wake, give_back, are_used
        self._loan = Loan()
        self._called_back: float | None = None
        """Monotonic seconds at which it was called back, until it is back."""

    @property
    def lent(self) -> bool | None:
        """Whether the device is lent now; None if it generates without loans."""
        return may_generate(self._loan, time.monotonic()) if self._are_used else None

    async def run(self) -> None:
        """Follow the commands of the scheduler, without end."""
        if not self._are_used:
            return
        self._announce()
        subject = subjects.device_subject(self._bus.run, self._worker.address)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._watch_deadline())
            async for received in self._bus.follow(subjects.DEVICE, [subject]):
                if isinstance(received.message, SetDevice):
                    self._follow(received.message)

    def note_free(self) -> None:
        """Note that the device does nothing: if it was called back, it is back now."""
        if self._called_back is not None:
            seconds, self._called_back = time.monotonic() - self._called_back, None
            LOAN_RETURN_SECONDS.observe(seconds)
            log.info("device_returned", loan=self._loan.loan_number, ms=round(1000 * seconds, 3))

    def _follow(self, command: SetDevice) -> None:
        before, self._loan = self._loan, apply(self._loan, command, time.monotonic())
        if self._loan is before:
            return
        if command.mode == "train":
            if not command.keep:
                self._give_back()
            if before.mode == "generate":
                self._called_back = time.monotonic()
        self._announce()

    async def _watch_deadline(self) -> None:
        """End a loan by itself: a scheduler that has died cannot keep a device from training."""
        while True:
            await asyncio.sleep(limits.DEADLINE_CHECK_S)
            before, self._loan = self._loan, tick(self._loan, time.monotonic())
            if self._loan is not before:
                log.warning("loan_expired", loan=self._loan.loan_number)
                self._announce()

    def _announce(self) -> None:
        """Report what the device is used for."""
        self._worker.loan = DeviceLoan(loan_number=self._loan.loan_number, mode=self._loan.mode)
        self._worker.report_now()
        self._wake()
