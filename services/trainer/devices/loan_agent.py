"""TAG on the trainer's side: while its devices are lent, they generate with the weights they train.

No reload: until the optimizer step the weights in memory are the committed version. A device
changes hands between two denoising steps, so whoever calls it back waits for one step at most. A
fragment that is interrupted is kept and goes on at the next loan, bit for bit as if it had not
been, while its version is in use.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from typing import Literal

import structlog

from services.trainer.devices.device import Generates, Lane
from shared.bus.bus import Bus
from shared.devices.loan import Loan, apply, may_generate, tick
from shared.devices.protocols import Generated
from shared.errors import DigenRLError, IntegrityError
from shared.messages import subjects
from shared.messages.contracts import GenerateFragment, Policy, SetDevice
from shared.messages.workers import DeviceLoan
from shared.process.worker import Worker
from shared.telemetry import LOAN_RETURN_SECONDS

DEADLINE_CHECK_S = 0.2

log = structlog.get_logger()


class Helper:
    def __init__(self, lanes: Sequence[Lane], bus: Bus, worker: Worker) -> None:
        """``lanes``: the trainer's devices, which all generate."""
        self._lanes = lanes
        self._bus = bus
        self._worker = worker
        self._policy: Policy | None = None
        """Whose weights the devices hold."""
        self._loan = Loan()
        self._waiting: deque[GenerateFragment] = deque()
        """For the lane that is free first."""
        self._told_to_return: float | None = None
        self._step_ms: float | None = None
        """Of the newest denoising step."""
        self._telling = asyncio.TaskGroup()
        """What becomes of fragments is stored and told beside what the devices do next."""

    async def run(self) -> None:
        self._observe()
        async with self._telling as tasks:
            tasks.create_task(self._follow_commands())
            tasks.create_task(self._follow_tasks())
            tasks.create_task(self._watch_deadline())

    def use(self, policy: Policy) -> None:
        """The devices hold other weights: fragments of any other version are given back."""
        self._policy = policy
        for task in self._taken_back(lambda task: task.policy != policy):
            self._release(task, "stale")

    def may_go_on(self, lane: Lane) -> bool:
        """Whether the lane has a denoising step to take, or a fragment to begin or to decode."""
        work = lane.task is not None or bool(self._waiting)
        return work and may_generate(self._loan, time.monotonic())

    async def go_on(self, lane: Lane) -> None:
        """One denoising step further, or one fragment begun or decoded. The caller holds the
        device, for no more than that."""
        task = lane.task = lane.task or self._waiting.popleft()
        generates = lane.generates
        assert generates is not None
        lane.is_generating = True
        try:
            with lane.use.use("generation"), self._worker.doing("generating"):
                generated = await self._advanced(lane, generates, task)
            if generated is not None and _let_go(lane, task):
                self._tell(generates.publisher.publish(task, generated))
        except IntegrityError:
            if _let_go(lane, task):  # an optimizer step has made another version of the weights
                self._release(task, "stale")
        except DigenRLError as error:
            if _let_go(lane, task):
                self._tell(generates.publisher.fail(task, error))
        finally:
            lane.is_generating = False
            self._note_return()

    async def _advanced(
        self, lane: Lane, generates: Generates, task: GenerateFragment
    ) -> Generated | None:
        work = lane.begun
        if work is None:
            if task.policy != self._policy:
                raise IntegrityError(f"version {task.policy.version} is not what this device holds")
            work = await generates.device.begin(task)
        elif not work.done:
            before = work.seconds
            await work.advance()
            self._step_ms = round(1000 * (work.seconds - before), 3)
            if not before:  # all devices are at work by now
                generates.publisher.prepare(task)
        else:
            return await work.finish()
        if lane.task is task:  # it may have been taken back meanwhile
            lane.begun = work
        return None

    async def _follow_commands(self) -> None:
        subject = subjects.device_subject(self._bus.run, self._worker.address)
        async for received in self._bus.follow(subjects.DEVICE, [subject]):
            if isinstance(received.message, SetDevice):
                self._follow(received.message)

    def _follow(self, command: SetDevice) -> None:
        before, self._loan = self._loan, apply(self._loan, command, time.monotonic())
        if self._loan is before:
            return
        if command.mode == "train" and not command.keep:
            # Told as well: a scheduler that was started again may not know who has it.
            for task in self._taken_back(lambda _: True):
                self._release(task, "returned")
        if before.mode == "generate" and command.mode == "train":
            self._told_to_return = time.monotonic()
            self._note_return()
        self._observe()

    async def _follow_tasks(self) -> None:
        subject = subjects.tasks_for(self._bus.run, self._worker.address)
        async for received in self._bus.follow(subjects.TASK, [subject]):
            if isinstance(received.message, GenerateFragment):
                self._waiting.append(received.message)
                self._wake_lanes()

    async def _watch_deadline(self) -> None:
        """Nobody has to tell a device that its loan is over."""
        while True:
            await asyncio.sleep(DEADLINE_CHECK_S)
            before, self._loan = self._loan, tick(self._loan, time.monotonic())
            if self._loan is not before:
                log.warning("loan_expired", generation=self._loan.loan_number)
                self._observe()

    def _observe(self) -> None:
        """Say what the devices are used for."""
        self._worker.loan = DeviceLoan(loan_number=self._loan.loan_number, mode=self._loan.mode)
        self._worker.report_now()
        self._wake_lanes()

    def _wake_lanes(self) -> None:
        for lane in self._lanes:
            lane.something.set()

    def _taken_back(self, chosen: Callable[[GenerateFragment], bool]) -> list[GenerateFragment]:
        """Fragments that are begun or waiting, and are so no more."""
        taken = [task for task in self._waiting if chosen(task)]
        self._waiting = deque(task for task in self._waiting if not chosen(task))
        for lane in self._lanes:
            task = lane.task
            if task is not None and chosen(task):
                _let_go(lane, task)
                taken.append(task)
        return taken

    def _release(self, task: GenerateFragment, reason: Literal["stale", "returned"]) -> None:
        generates = self._lanes[0].generates
        assert generates is not None
        self._tell(generates.publisher.release(task, reason))

    def _tell(self, telling: Coroutine[None, None, None]) -> None:
        self._telling.create_task(telling)

    def _note_return(self) -> None:
        if self._told_to_return is None or any(lane.is_generating for lane in self._lanes):
            return
        seconds = time.monotonic() - self._told_to_return
        LOAN_RETURN_SECONDS.observe(seconds)
        log.info(
            "device_returned",
            generation=self._loan.loan_number,
            ms=round(1000 * seconds, 3),
            step_ms=self._step_ms,
        )
        self._told_to_return = None


def _let_go(lane: Lane, task: GenerateFragment) -> bool:
    """The lane is done with its fragment; False if that was taken from it meanwhile."""
    if lane.task is not task:
        return False
    lane.task = lane.begun = None
    return True
