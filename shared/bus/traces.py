"""Follows a sample through the services: spans of work, linked by a header of NATS messages.

A trace is a group: what the scheduler sends, what a device generates and stores, what scorers take,
the training and the commit. A message about a group carries W3C's `traceparent`; its receiver
continues the trace. Without a collector nothing is sent, no message has the header, and only the
log lines name their batch, group and fragment.
"""

import secrets
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import structlog

from shared.limits import MAX_KEPT_SPANS
from shared.messages.contracts import FragmentGenerated, GenerateFragment, Message, PolicyPublished

HEADER = "traceparent"


@dataclass(frozen=True, slots=True)
class TracedWork:
    """Names what a span is about: a group, or one fragment of it."""

    batch: int
    group: int
    fragment: int | None = None
    """The fragment's first sample."""

    @property
    def whole(self) -> "TracedWork":
        """The group."""
        return TracedWork(self.batch, self.group)

    @property
    def words(self) -> dict[str, int]:
        """Return it as fields of a log line or a span."""
        given = {"batch": self.batch, "group": self.group, "fragment": self.fragment}
        return {name: value for name, value in given.items() if value is not None}


def traced_work(message: Any) -> TracedWork | None:
    """Return what a message, or a slot, is about; None if it is about no group."""
    slot = getattr(message, "fragment", None) or getattr(message, "slot", None) or message
    batch, group = getattr(slot, "batch", None), getattr(slot, "group", None)
    if not isinstance(batch, int) or not isinstance(group, int):
        return None
    return TracedWork(batch, group, getattr(slot, "first_sample", None))


@dataclass(frozen=True, slots=True)
class Context:
    """Names a span: its trace's number of 128 bits, and its own of 64."""

    trace: int
    span: int

    @property
    def header(self) -> str:
        return f"00-{self.trace:032x}-{self.span:016x}-01"

    @classmethod
    def parse(cls, header: Any) -> "Context | None":
        """Return the context in a header; None without a valid one."""
        parts = str(header or "").split("-")
        if len(parts) != 4 or [len(part) for part in parts] != [2, 32, 16, 2]:
            return None
        try:
            context = cls(int(parts[1], 16), int(parts[2], 16))
        except ValueError:
            return None
        return context if context.trace and context.span else None


def _new_span(trace: int) -> Context:
    return Context(trace, secrets.randbits(63) + 1)


@dataclass(frozen=True, slots=True)
class Span:
    """Records a piece of work that is done."""

    name: str
    context: Context
    parent: int | None
    began: int
    """Nanoseconds of the Unix clock."""
    ended: int
    fields: Mapping[str, str | int | float]
    links: tuple[Context, ...] = ()
    """Spans, besides the parent, that it needed."""


@dataclass(slots=True)
class Traces:
    """Knows the newest span of each piece of work, and gives spans to a collector."""

    export: Callable[[Span], None]
    share: float = 1.0
    """Share of the groups that are traced, decided where a trace begins."""
    _newest: OrderedDict[TracedWork, Context | None] = field(default_factory=OrderedDict)
    """None: of a group that is not traced."""
    _roots: dict[TracedWork, tuple[Context, int]] = field(default_factory=dict)
    """Groups that this process has begun and that are in no version, with the time."""
    _links: dict[TracedWork, dict[TracedWork, Context]] = field(default_factory=dict)
    """Newest spans of a group's fragments."""

    def parent_of(self, place: TracedWork) -> Context | None:
        parent = self._newest.get(place)
        return self._newest.get(place.whole) if parent is None else parent

    def reached(self, place: TracedWork, context: Context | None) -> None:
        """Continue from a span, with this piece of work and its group."""
        for each in {place, place.whole}:
            self._newest[each] = context
            self._newest.move_to_end(each)
        if place.fragment is not None and context is not None:
            self._links.setdefault(place.whole, {})[place] = context
        while len(self._newest) > MAX_KEPT_SPANS:
            oldest, _ = self._newest.popitem(last=False)
            self._links.pop(oldest, None)

    def begin(self, place: TracedWork) -> Context | None:
        """Return the root of a group, a new one if it has none."""
        context = self._roots.get(place.whole)
        if context is not None:
            return context[0]
        if secrets.randbelow(1_000_000) >= self.share * 1_000_000:
            return None
        root = _new_span(secrets.randbits(127) + 1)
        self._roots[place.whole] = root, time.time_ns()
        return root

    def send(self, message: Message) -> Context | None:
        """Record that a message is sent; returns its span."""
        place = traced_work(message)
        if place is None:
            return None
        begins = isinstance(message, GenerateFragment)
        parent = self.begin(place) if begins else self.parent_of(place)
        if parent is None:
            return None
        now, context = time.time_ns(), _new_span(parent.trace)
        others = self._links.get(place, {}).values()
        links = tuple(each for each in others if each != parent and each.trace == parent.trace)
        name = f"send {message.kind}"
        self.export(Span(name, context, parent.span, now, now, place.words, links))
        self.reached(place, context)
        return context

    def receive(self, message: Any, context: Context | None) -> None:
        """Continue the trace of a message's sender."""
        if isinstance(message, PolicyPublished):
            self.finish(message.policy.version)
        place = traced_work(message)
        if place is None:
            return
        is_behind = isinstance(message, FragmentGenerated) and place.whole in self._roots
        if not is_behind:  # the scheduler may hear of it after its score
            self.reached(place, context)

    def finish(self, version: int) -> None:
        """End the groups that are part of a version."""
        for place in [each for each in self._roots if each.batch < version]:
            root, began = self._roots.pop(place)
            self.export(Span("group", root, None, began, time.time_ns(), place.words))


_current: Traces | None = None


def trace_to(traces: Traces | None) -> None:
    """Have this process trace what it does; None: nothing."""
    global _current
    _current = traces


def sent(message: Message, headers: dict[str, str] | None) -> dict[str, str] | None:
    """Return the headers with which a message is sent."""
    context = None if _current is None else _current.send(message)
    return headers if context is None else {**(headers or {}), HEADER: context.header}


def received(message: Any, headers: Mapping[str, Any] | None) -> None:
    """Note where a message comes from."""
    if _current is not None:
        _current.receive(message, Context.parse((headers or {}).get(HEADER)))


@contextmanager
def span(name: str, what: Any, *, seconds: float = 0.0, **more: str | float) -> Iterator[None]:
    """Run a piece of work for a group or a fragment: log lines name it, and a trace has its
    duration.

    Args:
        what: a message or a slot.
        seconds: how long ago it was begun.
    """
    place = what if isinstance(what, TracedWork) else traced_work(what)
    if place is None:
        yield
        return
    traces, began = _current, time.time_ns() - int(seconds * 1e9)
    parent = None if traces is None else traces.parent_of(place)
    if traces is None or parent is None:
        with about(place):
            yield
        return
    context = _new_span(parent.trace)
    traces.reached(place, context)
    try:
        with about(place):
            yield
    finally:
        fields = {**place.words, **more}
        traces.export(Span(name, context, parent.span, began, time.time_ns(), fields))


def did(name: str, what: Any, *, seconds: float, **more: str | float) -> None:
    """Record a piece of work that was just done."""
    with span(name, what, seconds=seconds, **more):
        pass


@contextmanager
def about(what: Any) -> Iterator[None]:
    """Add the group, the fragment and the trace to log lines."""
    place = what if isinstance(what, TracedWork) else traced_work(what)
    fields: dict[str, Any] = {} if place is None else dict(place.words)
    context = None if _current is None or place is None else _current.parent_of(place)
    if context is not None:
        fields["trace"] = f"{context.trace:032x}"
    with structlog.contextvars.bound_contextvars(**fields):
        yield
