"""Runs tests in several processes that are forked once all tests are collected.

Most of the time of collection goes into importing what the tests need, and processes that are
forked afterwards have it already. Each takes one file after the other.

    pytest -p tests.side_by_side --processes 3
"""

import contextlib
import gc
import io
import os
import pickle
import selectors
import signal
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from digenrl.local.linux import die_with_parent

NUMBER_BYTES = 4
LENGTH_BYTES = 8
Group = Sequence[pytest.Item]
"""Tests that one process takes, one after the other."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--processes", type=int, default=1, help="that run a file of tests each")


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool | None:
    number = session.config.option.processes
    if number < 2 or session.config.option.collectonly or session.testsfailed:
        return None  # pytest goes on as it always does
    SideBySide(session).run(number)
    return True


def groups_of(items: Sequence[pytest.Item]) -> list[Group]:
    """Return the tests of each file, or of each mark `together`.

    The longest come first as far as that is known: whole runs by their limits, and the trainer's,
    whose folder is the last one, before the others.
    """
    groups: dict[str, list[pytest.Item]] = {}
    for item in reversed(items):
        marker = item.get_closest_marker("together")
        groups.setdefault(marker.args[0] if marker else str(item.path), []).insert(0, item)
    return sorted(groups.values(), key=_limit, reverse=True)


def _limit(group: Group) -> float:
    markers = [item.get_closest_marker("timeout") for item in group]
    return max((marker.args[0] for marker in markers if marker), default=0.0)


def has_runs(group: Group) -> bool:
    return any(item.get_closest_marker("run") for item in group)


class Numbers:
    """Numbers in a pipe, each of which is given to one process."""

    def __init__(self, numbers: Sequence[int]) -> None:
        self._read, write = os.pipe()
        os.write(write, b"".join(number.to_bytes(NUMBER_BYTES) for number in numbers))
        os.close(write)

    def take(self) -> int | None:
        data = os.read(self._read, NUMBER_BYTES)
        return int.from_bytes(data) if data else None


@dataclass(slots=True)
class Child:
    """A process that runs tests, as the first process sees it."""

    pid: int
    pipe: int
    """Pipe in which it reports."""
    at: str | None = None
    """The test that it began last; None once it has run all."""
    _received: bytearray = field(default_factory=bytearray)

    def messages(self, data: bytes) -> Iterator[Any]:
        """Yield what has arrived as a whole."""
        self._received += data
        while len(self._received) >= LENGTH_BYTES:
            end = LENGTH_BYTES + int.from_bytes(self._received[:LENGTH_BYTES])
            if len(self._received) < end:
                return
            yield pickle.loads(self._received[LENGTH_BYTES:end])  # noqa: S301 -- of our own child
            del self._received[:end]


class SideBySide:
    """Forks processes, and reports what they do.

    Whole runs wait much of their time. So one process begins with them, while the others compute.
    """

    def __init__(self, session: pytest.Session) -> None:
        self.session = session
        self.groups = groups_of(session.items)
        numbers = range(len(self.groups))
        self.runs = Numbers([n for n in numbers if has_runs(self.groups[n])])
        self.others = Numbers([n for n in numbers if not has_runs(self.groups[n])])

    def run(self, number: int) -> None:
        """Fork so many processes, and report until the last of them has ended."""
        base = self.session.config._tmp_path_factory.getbasetemp()  # type: ignore[attr-defined]
        gc.collect()
        gc.freeze()  # what is not looked at stays shared, and takes no time in later collections
        children = [self._fork(base / f"p{each}", first=each == 0) for each in range(number)]
        try:
            self._listen(children)
        finally:
            for child in children:
                os.kill(child.pid, signal.SIGKILL)  # if it has not ended
                os.waitpid(child.pid, 0)

    def _fork(self, folder: Path, *, first: bool) -> Child:
        read, write = os.pipe()
        sys.stdout.flush()
        sys.stderr.flush()
        pid = os.fork()
        if pid:
            os.close(write)
            return Child(pid, read, at="its first test")
        os.close(read)
        status = 1
        with contextlib.suppress(KeyboardInterrupt):  # the first process says so
            try:
                if sys.platform == "linux":
                    die_with_parent()
                queues = (self.runs, self.others) if first else (self.others, self.runs)
                Runner(self.session, self.groups, queues, write).run(folder)
                status = 0
            except Exception:
                traceback.print_exc(file=sys.__stderr__)
        os._exit(status)

    def _listen(self, children: Sequence[Child]) -> None:
        with selectors.DefaultSelector() as selector:
            for child in children:
                selector.register(child.pipe, selectors.EVENT_READ, child)
            while selector.get_map():
                for key, _ in selector.select():
                    self._read(selector, key.data)
                    if self.session.shouldfail:
                        raise self.session.Failed(self.session.shouldfail)

    def _read(self, selector: selectors.BaseSelector, child: Child) -> None:
        data = os.read(child.pipe, 1 << 16)
        for message in child.messages(data):
            if isinstance(message, dict):
                self._report(message)
            else:
                child.at = message
        if not data or child.at is None:  # what it has forked may keep the pipe open
            selector.unregister(child.pipe)
            os.close(child.pipe)
            if child.at is not None:
                self._report_death(child, child.at)

    def _report(self, message: dict[str, Any]) -> None:
        hook, config = self.session.config.hook, self.session.config
        report = hook.pytest_report_from_serializable(config=config, data=message)
        hook.pytest_runtest_logreport(report=report)

    def _report_death(self, child: Child, at: str) -> None:
        """Report the test at which a process has died, which takes those after it along."""
        said = "the process that ran this test has died, and has not run those that came after it"
        location = (at.partition("::")[0], None, at)
        report = pytest.TestReport(at, location, {}, "failed", said, "call")
        self.session.config.hook.pytest_runtest_logreport(report=report)


@dataclass(frozen=True, slots=True)
class Runner:
    """Runs tests in a forked process."""

    session: pytest.Session
    groups: Sequence[Group]
    queues: Sequence[Numbers]
    """Where it takes groups from: of the second when the first is empty."""
    pipe: int

    def run(self, folder: Path) -> None:
        """Run groups until all are taken, each with all of its fixtures; ``folder``: for temporary
        files."""
        folder.mkdir()
        self._write_apart(folder)
        for group in self._taken():
            for item, following in zip(group, [*group[1:], None], strict=True):
                self._send(item.nodeid)
                item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
        self._send(None)

    def _write_apart(self, folder: Path) -> None:
        """Keep what this process writes apart from what the others write."""
        config = self.session.config
        capture = config.pluginmanager.getplugin("capturemanager")
        assert capture is not None
        capture.stop_global_capturing()
        capture.start_global_capturing()
        terminal = config.pluginmanager.getplugin("terminalreporter")
        assert terminal is not None
        terminal._tw._file = io.StringIO()
        config._tmp_path_factory._basetemp = folder  # type: ignore[attr-defined]
        config.pluginmanager.register(Reports(config, self._send))

    def _taken(self) -> Iterator[Group]:
        """Take one group after the other, as long as there are some."""
        for queue in self.queues:
            while (number := queue.take()) is not None:
                yield self.groups[number]

    def _send(self, message: Any) -> None:
        data = pickle.dumps(message)
        data = len(data).to_bytes(LENGTH_BYTES) + data
        while data:
            data = data[os.write(self.pipe, data) :]


@dataclass(frozen=True, slots=True)
class Reports:
    """Sends reports to the first process, which makes them known."""

    config: pytest.Config
    send: Callable[[Any], None]

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        hook = self.config.hook
        self.send(hook.pytest_report_to_serializable(config=self.config, report=report))
