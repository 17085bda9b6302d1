"""TAG on the trainer's side: while its device is lent, it generates with the weights it trains.

No reload: until the optimizer step the weights in memory are the committed version. The device
changes hands between two denoising steps, under one lock that serves whoever asks first, so a
group that is ready waits for one step at most. A fragment that is interrupted is kept and goes on
at the next loan, bit for bit as if it had not been, while its version is in use.
"""

import asyncio
import time
from collections import deque

import structlog

from shared import subjects
from shared.bus import Bus
from shared.contracts import DeviceLoan, GenerateFragment, SetDevice
from shared.diffusion.generation import Generated, GenerationInProgress, Generator
from shared.diffusion.publishing import FragmentPublisher
from shared.errors import DigenRLError, IntegrityError
from shared.loan import DeviceUse, Loan, apply, may_generate, tick
from shared.telemetry import LOAN_RETURN_SECONDS
from shared.worker import Worker

DEADLINE_CHECK_S = 0.2

log = structlog.get_logger()


class Helper:
    def __init__(
        self,
        generator: Generator,
        publisher: FragmentPublisher,
        bus: Bus,
        worker: Worker,
        device: asyncio.Lock,
        use: DeviceUse,
    ) -> None:
        self._generator = generator
        self._publisher = publisher
        self._bus = bus
        self._worker = worker
        self._device = device
        self._use = use
        self._loan = Loan()
        self._waiting: deque[GenerateFragment] = deque()
        self._begun: GenerationInProgress | None = None
        self._something = asyncio.Event()
        """There may be something to generate, and the right to."""
        self._told_to_return: float | None = None
        self._step_ms: float | None = None
        """Of the newest denoising step."""

    async def run(self) -> None:
        self._observe()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._follow_commands())
            tasks.create_task(self._follow_tasks())
            tasks.create_task(self._watch_deadline())
            tasks.create_task(self._generate(tasks))

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
            self._waiting.clear()
            self._begun = None
        if before.mode == "generate" and command.mode == "train":
            self._told_to_return = time.monotonic()
        self._observe()

    async def _follow_tasks(self) -> None:
        subject = subjects.tasks_for(self._bus.run, self._worker.address)
        async for received in self._bus.follow(subjects.TASK, [subject]):
            if isinstance(received.message, GenerateFragment):
                self._waiting.append(received.message)
                self._something.set()

    async def _watch_deadline(self) -> None:
        """Nobody has to tell a device that its loan is over."""
        while True:
            await asyncio.sleep(DEADLINE_CHECK_S)
            before, self._loan = self._loan, tick(self._loan, time.monotonic())
            if self._loan is not before:
                log.warning("loan_expired", generation=self._loan.generation)
                self._observe()

    def _observe(self) -> None:
        """Say what the device is used for."""
        self._worker.loan = DeviceLoan(generation=self._loan.generation, mode=self._loan.mode)
        self._worker.report_now()
        self._something.set()

    async def _generate(self, tasks: asyncio.TaskGroup) -> None:
        while True:
            await self._something.wait()
            self._something.clear()
            while self._may_go_on():
                await self._go_on(tasks)
            self._note_return()

    def _may_go_on(self) -> bool:
        work = self._begun is not None or bool(self._waiting)
        return work and may_generate(self._loan, time.monotonic())

    async def _go_on(self, tasks: asyncio.TaskGroup) -> None:
        """One denoising step further, or one fragment begun or decoded: the device is held for
        no more than that."""
        async with self._device:
            if not self._may_go_on():
                return
            with self._use.use("generation"), self._worker.doing("generating"):
                finished = await self._advance()
        if finished is not None:
            tasks.create_task(self._publisher.publish(*finished))

    async def _advance(self) -> tuple[GenerateFragment, Generated] | None:
        work = self._begun
        task = self._waiting.popleft() if work is None else work.task
        try:
            if work is None:
                work = await asyncio.to_thread(self._begin, task)
            elif not work.done:
                before = work.seconds
                await asyncio.to_thread(self._generator.advance, work)
                self._step_ms = round(1000 * (work.seconds - before), 3)
            else:
                generated = await asyncio.to_thread(self._generator.finish, work)
                self._begun = None
                return task, generated
            if self._loan.mode == "generate" or self._loan.keep:
                self._begun = work
        except IntegrityError:
            self._begun = None  # an optimizer step has made another version of the weights
            await self._publisher.release(task, "stale")
        except DigenRLError as error:
            self._begun = None
            await self._publisher.fail(task, error)
        return None

    def _begin(self, task: GenerateFragment) -> GenerationInProgress:
        if self._generator.weights_digest() != task.policy.weights_digest:
            raise IntegrityError(f"version {task.policy.version} is not what this device holds")
        return self._generator.begin(task)

    def _note_return(self) -> None:
        if self._told_to_return is not None:
            seconds = time.monotonic() - self._told_to_return
            LOAN_RETURN_SECONDS.observe(seconds)
            log.info(
                "device_returned",
                generation=self._loan.generation,
                ms=round(1000 * seconds, 3),
                step_ms=self._step_ms,
            )
            self._told_to_return = None
