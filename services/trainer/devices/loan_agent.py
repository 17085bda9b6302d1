"""TAG on the trainer's side: while its devices are lent, they generate with the weights they train.

No reload: until the optimizer step the weights in memory are the committed version. A device
changes hands between two denoising steps, so whoever calls it back waits for one step at most. A
fragment that is interrupted is kept and goes on at the next loan, bit for bit as if it had not
been, while its version is in use.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Literal

import structlog

from services.trainer.devices.device import TrainerDevice
from shared.devices.conditions import EncodedConditions, FragmentQueue, QueuedFragment
from shared.devices.loan import Loan, apply, may_generate, tick
from shared.devices.protocols import Generated
from shared.errors import DigenRLError, IntegrityError
from shared.messages import subjects
from shared.messages.contracts import GenerateFragment, Policy, SetDevice
from shared.messages.workers import DeviceLoan
from shared.process.worker import WorkerContext
from shared.run.sources import SourceImages
from shared.telemetry import LOAN_RETURN_SECONDS

DEADLINE_CHECK_S = 0.2

log = structlog.get_logger()


class LoanAgent:
    """Owns the loan of all devices, and the fragments that wait for one of them."""

    def __init__(
        self,
        devices: Sequence[TrainerDevice],
        context: WorkerContext,
        encoded: EncodedConditions | None = None,
    ) -> None:
        """``devices``: the trainer's, all of which can generate; ``encoded``: where conditions come
        from, if they do not encode."""
        self._devices = devices
        self._bus = context.bus
        self._worker = context.worker
        self._policy: Policy | None = None
        """The version whose weights the devices hold."""
        self._loan = Loan()
        self._waiting = FragmentQueue(
            self._worker, encoded, SourceImages(context.store, context.bus),
            wake=self._wake_devices,
        )  # fmt: skip
        """Fragments for the device that is free first."""
        self._told_to_return: float | None = None
        self._step_ms: float | None = None
        """Duration of the newest denoising step."""
        self._telling = asyncio.TaskGroup()
        """Stores and reports fragments beside what the devices do next."""

    async def run(self) -> None:
        self._announce()
        async with self._telling as tasks:
            tasks.create_task(self._follow_commands())
            tasks.create_task(self._follow_tasks())
            tasks.create_task(self._watch_deadline())

    def use(self, policy: Policy | None) -> None:
        """The devices hold other weights: fragments of any other version are given back. Nothing is
        generated while it is not known of which version they are, which is None."""
        self._policy = policy
        for task in self._take_back(lambda task: task.policy != policy):
            self._release(task, "stale")

    def may_go_on(self, device: TrainerDevice) -> bool:
        """Whether the device has a denoising step to take, or a fragment to begin or to decode."""
        has_work = device.task is not None or self._waiting.has_ready
        return has_work and may_generate(self._loan, time.monotonic())

    async def go_on(self, device: TrainerDevice) -> None:
        """Take one denoising step, or begin or decode a fragment. The caller holds the device."""
        queued = device.queued or device.assign(self._waiting.take())
        task = queued.task
        try:
            generated = await self._advanced(device, queued)
            if generated is not None and device.drop(task):
                publishing = device.publisher.publish(task, generated, queued.conditions)
                self._telling.create_task(publishing)
        except IntegrityError:
            if device.drop(task):  # an optimizer step has made another version of the weights
                self._release(task, "stale")
        except DigenRLError as error:
            if device.drop(task):
                self._telling.create_task(device.publisher.fail(task, error))
        finally:
            self._observe_return()

    async def _advanced(self, device: TrainerDevice, queued: QueuedFragment) -> Generated | None:
        if queued.fault is not None:
            raise queued.fault
        version = queued.task.policy
        if not device.has_begun and version != self._policy:
            raise IntegrityError(f"version {version.version} is not what this device holds")
        with self._worker.doing("generating"):
            generated = await device.advance()
        if device.step_seconds is not None:
            self._step_ms = round(1000 * device.step_seconds, 3)
        return generated

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
            for task in self._take_back(lambda _: True):
                self._release(task, "returned")
        if before.mode == "generate" and command.mode == "train":
            self._told_to_return = time.monotonic()
            self._observe_return()
        self._announce()

    async def _follow_tasks(self) -> None:
        subject = subjects.tasks_for(self._bus.run, self._worker.address)
        async for received in self._bus.follow(subjects.TASK, [subject]):
            if isinstance(received.message, GenerateFragment):
                self._waiting.put(received.message, self._telling)

    async def _watch_deadline(self) -> None:
        """Ends a loan by itself: nobody has to tell a device that it is over."""
        while True:
            await asyncio.sleep(DEADLINE_CHECK_S)
            before, self._loan = self._loan, tick(self._loan, time.monotonic())
            if self._loan is not before:
                log.warning("loan_expired", generation=self._loan.loan_number)
                self._announce()

    def _announce(self) -> None:
        """Say what the devices are used for."""
        self._worker.loan = DeviceLoan(loan_number=self._loan.loan_number, mode=self._loan.mode)
        self._worker.report_now()
        self._wake_devices()

    def _wake_devices(self) -> None:
        for device in self._devices:
            device.wake()

    def _take_back(self, chosen: Callable[[GenerateFragment], bool]) -> list[GenerateFragment]:
        """Remove the chosen fragments, which wait or are begun, and return them."""
        taken = self._waiting.remove(chosen)
        for device in self._devices:
            task = device.task
            if task is not None and chosen(task):
                device.drop(task)
                taken.append(task)
        return taken

    def _release(self, task: GenerateFragment, reason: Literal["stale", "returned"]) -> None:
        self._telling.create_task(self._devices[0].publisher.release(task, reason))

    def _observe_return(self) -> None:
        """Measure how long the devices took to come back, once the last one has."""
        if self._told_to_return is None or any(each.is_generating for each in self._devices):
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
