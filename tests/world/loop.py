"""An event loop with virtual time, and the processes that live in it.

Time goes on only when nothing else is to be done, straight to the next timer. What runs in a thread
elsewhere runs at once here. A process is everything that was started in its context: its tasks,
their timers and callbacks. A killed one does nothing more, not even the end of its blocks; one that
hangs does it later.
"""

import asyncio
import contextlib
import contextvars
import gc
import heapq
from collections import deque
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import dataclass, field
from itertools import count
from random import Random
from typing import Any, Literal

THREAD_S = 2e-4
"""Longest time until a thread begins with what it is given, in seconds."""
TURN_S = 1e-6
"""Seconds that pass while callbacks run: a wait in ever smaller parts comes to its end."""

Flaw = Literal["", "other bits", "no memory"]
"""What a device does wrong once."""
_process: contextvars.ContextVar["Process | None"] = contextvars.ContextVar("process", default=None)


class Idle(Exception):
    """Nothing is left to be done, and nothing is waited for."""


class Killed(BaseException):
    """Ends the call in which a process was killed."""


@dataclass(eq=False, slots=True)
class Process:
    """A process of the world; ``random`` is all that is random in it."""

    name: str
    random: Random
    state: Literal["runs", "hangs", "dead"] = "runs"
    clock_offset: float = 0.0
    """Seconds by which its wall clock is wrong."""
    at_death: list[Callable[[], None]] = field(default_factory=list)
    """What its kernel does when it has ended: it closes connections."""
    has_hung_device: bool = False
    """Whether what its device does next never ends."""
    told_to_end: "asyncio.Future[None] | None" = None
    """Is done once it has got SIGTERM; None until it serves."""
    flaw: Flaw = ""
    failing: tuple[int, Callable[["Process"], None]] | None = None
    """What happens to it before a callback, and how many callbacks are run before that one."""
    _later: list["_Handle"] = field(default_factory=list)

    def start(self, work: Coroutine[Any, Any, None]) -> "asyncio.Task[None]":
        """Begin its work; everything that the work starts belongs to the process."""
        context = contextvars.copy_context()
        context.run(_process.set, self)
        return asyncio.get_running_loop().create_task(work, name=self.name, context=context)

    def kill(self) -> None:
        if self.state == "dead":
            return
        self.state = "dead"
        self._later.clear()
        for close in self.at_death:
            close()

    def takes(self, flaw: Flaw) -> bool:
        """Whether its device does this now; it does so once."""
        found = self.flaw == flaw
        self.flaw = "" if found else self.flaw
        return found

    def hang(self) -> None:
        if self.state == "runs":
            self.state = "hangs"

    def go_on(self) -> None:
        """Do what was to be done meanwhile, in its order."""
        if self.state == "hangs":
            self.state = "runs"
            later, self._later = self._later, []
            loop_of_world().take(later)

    def admits(self, handle: "_Handle") -> bool:
        """Whether a callback is run now."""
        if self.failing is not None:
            left, fail = self.failing
            self.failing = (left - 1, fail) if left else None
            if not left:
                fail(self)
        if self.state == "hangs":
            self._later.append(handle)
        return self.state == "runs"


def current() -> Process | None:
    """Return the process that runs."""
    return _process.get()


def loop_of_world() -> "WorldLoop":
    loop = asyncio.get_running_loop()
    assert isinstance(loop, WorldLoop)
    return loop


class _Task(asyncio.Task[Any]):
    """A task whose place in a set follows from its number, not from where it lies in memory: task
    groups keep theirs in a set, and cancel them in that order."""

    def __init__(self, coroutine: Any, number: int, **options: Any) -> None:
        self.number = number
        super().__init__(coroutine, **options)

    def __hash__(self) -> int:
        return self.number


class _Handle:
    """Is asyncio's, with nothing for debugging."""

    __slots__ = "_args", "_callback", "_cancelled", "_context", "_when"
    _source_traceback = None

    def __init__(self, callback: Any, args: Any, context: Any, when: float = 0.0) -> None:
        self._callback, self._args, self._when = callback, args, when
        self._context = contextvars.copy_context() if context is None else context
        self._cancelled = False

    def when(self) -> float:
        return self._when

    def cancelled(self) -> bool:
        return self._cancelled

    def cancel(self) -> None:
        self._cancelled = True
        self._callback = self._args = None


class WorldLoop(asyncio.BaseEventLoop):
    """Runs one world, once."""

    _ready: deque[Any]
    _scheduled: list[Any]
    """Moments, numbers and timers: comparing tuples takes no Python."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.now = 0.0
        """Seconds of the world."""
        self.troubles: list[dict[str, Any]] = []
        """What asyncio would have written to the log."""
        self._numbers = count()
        """Timers of one moment are due in the order in which they were set."""
        self._threads = Random(f"{seed}/threads")
        self._tasks: list[asyncio.Task[Any]] = []
        """All that ever were: nothing of a dead process may be collected, which would end its
        blocks."""
        self.set_task_factory(self._make_task)
        self.set_exception_handler(lambda _, context: self.troubles.append(context))

    def time(self) -> float:
        return self.now

    def call_soon(  # type: ignore[override]
        self, callback: Callable[..., object], *args: Any, context: Any = None
    ) -> Any:
        handle = _Handle(callback, args, context)
        self._ready.append(handle)
        return handle

    def call_later(  # type: ignore[override]
        self, delay: float, callback: Callable[..., object], *args: Any, context: Any = None
    ) -> Any:
        return self.call_at(self.now + delay, callback, *args, context=context)

    def call_at(  # type: ignore[override]
        self, when: float, callback: Callable[..., object], *args: Any, context: Any = None
    ) -> Any:
        timer = _Handle(callback, args, context, when)
        heapq.heappush(self._scheduled, (when, next(self._numbers), timer))
        return timer

    def take(self, handles: Iterable["_Handle"]) -> None:
        """Run these callbacks soon, in their order."""
        self._ready.extend(handles)

    def run(self, work: Coroutine[Any, Any, None], *, leaves: bool = True) -> None:
        """Run until ``work`` ends; everything else is left as it stands.

        Args:
            leaves: whether coroutines that are left are ended.
        """
        was_collecting = gc.isenabled()
        gc.disable()  # what is collected may run code, at moments that no seed decides
        try:
            self.run_until_complete(work)
        finally:
            if leaves:
                self._leave()
            if was_collecting:
                gc.enable()

    def _leave(self) -> None:
        """End every coroutine that is left, where it stands."""
        self.close()
        for task in self._tasks:
            left: Any = task
            left._log_destroy_pending = False
            with contextlib.suppress(BaseException):
                left.get_coro().close()

    def _make_task(
        self, loop: asyncio.AbstractEventLoop, coroutine: Any, **options: Any
    ) -> "asyncio.Task[Any]":
        task = _Task(coroutine, len(self._tasks), loop=loop, **options)
        self._tasks.append(task)
        return task

    def run_in_executor(  # type: ignore[override]
        self, executor: Any, func: Callable[..., Any], *args: Any
    ) -> Any:
        """Run ``func`` within this thread, after the time that a thread may need to begin."""
        future = self.create_future()

        def work() -> None:
            if future.cancelled():
                return
            try:
                result = func(*args)
            except Exception as error:
                future.set_exception(error)
            else:
                future.set_result(result)

        self.call_later(self._threads.random() * THREAD_S, work)
        return future

    def _run_once(self) -> None:
        """Run what is ready; if nothing is, go on to the next timer."""
        scheduled = self._scheduled
        while scheduled and scheduled[0][2]._cancelled:
            heapq.heappop(scheduled)
        if not self._ready:
            if not scheduled:
                raise Idle
            self.now = max(self.now, scheduled[0][0])
        self.now += TURN_S
        while scheduled and scheduled[0][0] <= self.now:
            self._ready.append(heapq.heappop(scheduled)[2])
        ready = self._ready
        for _ in range(len(ready)):
            handle = ready.popleft()
            if not handle._cancelled:
                self._do(handle)

    def _do(self, handle: _Handle) -> None:
        process = handle._context.get(_process)
        if process is None or process.admits(handle):
            try:
                handle._context.run(handle._callback, *handle._args)
            except (KeyboardInterrupt, SystemExit):
                raise
            except BaseException as error:
                self.call_exception_handler({"message": "callback", "exception": error})

    def _write_to_self(self) -> None:
        """Nothing sleeps here that would have to be woken."""
