"""Judges what clients of a run were told, whoever answered them. Each rule returns sentences.

An answer may not be older than one that had arrived before it was asked for, and nothing may be
told that the store does not hold.
"""

import re
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

KINDS = {
    "commit": "c", "dead_letter": "l", "settled": "l", "request": "l", "phase": "l", "alarm": "l",
    "evaluation": "e",
}  # fmt: skip
"""Letter before the number of an event of each name, in the ids of events."""
Stored = Mapping[str, Mapping[int, Mapping[str, Any] | None]]
"""What the store holds: by the letter of its kind and its number from 0, fields that are told; None
for what is damaged, which may have been told before, or not."""


@dataclass(frozen=True, slots=True)
class Answer:
    """Holds an answer to a GET request."""

    client: str
    asked: float
    at: float
    server: str
    path: str
    status: int
    body: Any

    def __str__(self) -> str:
        return f"{self.client} was told by {self.server} at {self.at:.2f} s"


@dataclass(frozen=True, slots=True)
class EventRead:
    """Holds a server-sent event; over reconnections, a reader goes on."""

    client: str
    at: float
    id: str
    name: str
    fields: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Followed:
    """Says that a client began to wait for the end of the run, or has seen it."""

    client: str
    at: float
    outcome: str = ""
    """How the run ended; empty when the client begins."""


Observation = Answer | EventRead | Followed


def steps_that_go_back(seen: Iterable[Observation], *, stale_s: float = 0.0) -> list[str]:
    """Find steps smaller than one that the client knew, or the server had told, ``stale_s`` before
    it was asked for: a scheduler that is cut off goes on telling what it knows."""
    answers, found = _answers(seen, "/v1/run"), dict[str, None]()
    for by in ("client", "server"):
        for name in sorted({getattr(each, by) for each in answers}):
            same = [each for each in answers if getattr(each, by) == name]
            words = _decreases(same, lambda each: each.body["step"], "step {}", stale_s)
            found.update(dict.fromkeys(words))
    return list(found)


def ends_that_are_taken_back(seen: Iterable[Observation], *, stale_s: float = 0.0) -> list[str]:
    """Find a run that goes on although it was finished, with as many steps to make."""
    answers, found = _answers(seen, "/v1/run"), []
    for steps in sorted({each.body["steps"] for each in answers}):
        same = [each for each in answers if each.body["steps"] == steps]
        found += _decreases(
            same, lambda each: each.body["phase"] == "finished", "finished: {}", stale_s
        )
    return found


def letters_that_go_back(seen: Iterable[Observation], *, stale_s: float = 0.0) -> list[str]:
    """Find lists of all dead letters that end earlier than one before, and letters that change."""
    answers = [each for each in _answers(seen, "/v1/dead-letters") if "state=all" in each.path]

    def newest(answer: Answer) -> int:
        return max((letter["number"] for letter in answer.body), default=0)

    known: dict[int, Any] = {}
    found = _decreases(answers, newest, "dead letter {} as the newest", stale_s)
    for letter in (letter for answer in answers for letter in answer.body):
        told = letter["kind"], letter["subject"], letter["reason"]
        before = known.setdefault(letter["number"], told)
        if told != before:
            found.append(f"dead letter {letter['number']} was {before} and became {told}")
    return found


def steps_against_commits(
    seen: Iterable[Observation], commits: Sequence[float], *, late_s: float
) -> list[str]:
    """Find steps that were told before their commit, or not ``late_s`` seconds after it.

    Args:
        commits: when each version was stored, from version 0 on.
    """
    found = []
    for answer in _answers(seen, "/v1/run"):
        step = answer.body["step"]
        newest = max(0, bisect_right(commits, answer.at) - 1)
        due = max(0, bisect_right(commits, answer.asked - late_s) - 1)
        if step > newest:
            found.append(f"{answer} step {step}, but version {newest} was the newest")
        elif step < due:
            age = answer.asked - commits[due]
            found.append(f"{answer} step {step}, {age:.2f} s after the commit of version {due}")
    return found


def server_errors(seen: Iterable[Observation]) -> list[str]:
    """Find answers that say that a service has failed, and not that it cannot answer now."""
    answers = [each for each in seen if isinstance(each, Answer)]
    failed = [each for each in answers if each.status >= 500 and each.status != 503]
    return [f"{each} {each.status} for {each.path}: {each.body}" for each in failed]


def events_out_of_order(
    seen: Iterable[Observation], stored: Stored, alive: Collection[str] = ()
) -> list[str]:
    """Find events that readers were told twice, out of order, wrongly or never.

    Args:
        alive: readers that had the time to read everything.
    """
    events = [each for each in seen if isinstance(each, EventRead) and each.id]
    ends = {kind: max(facts, default=-1) + 1 for kind, facts in stored.items()}
    found = []
    for client in dict.fromkeys(each.client for each in events):
        faults, at = _read_through([each for each in events if each.client == client], stored)
        faults += _missing(at, ends, stored, "never") if client in alive else []
        found += [f"{client} {fault}" for fault in faults]
    return found


def late_followers(
    seen: Iterable[Observation], *, finished: float, now: float, patience_s: float,
    killed: Collection[str] = (),
) -> list[str]:  # fmt: skip
    """Find followers that ended before the run did, or not ``patience_s`` after its last commit."""
    newest = {each.client: each for each in seen if isinstance(each, Followed)}
    found = []
    for client, each in newest.items():
        if each.outcome and each.at < finished:
            ended = f"ended at {each.at:.2f} s with {each.outcome!r}"
            found.append(f"{client} {ended}; the run at {finished:.2f} s")
        elif not each.outcome and client not in killed and now - finished > patience_s:
            found.append(f"{client} still follows {now - finished:.0f} s after the last commit")
    return found


def _answers(seen: Iterable[Observation], path: str) -> list[Answer]:
    """Return the answers with status 200, in the order of their arrival."""
    found = [each for each in seen if isinstance(each, Answer) and each.status == 200]
    return sorted((each for each in found if each.path.split("?")[0] == path), key=lambda a: a.at)


def _decreases(
    answers: Sequence[Answer], value: Callable[[Answer], int], words: str, stale_s: float
) -> list[str]:
    """Find values that are smaller than one that had arrived before they were asked for."""
    times, found = [each.at for each in answers], []
    largest = list(accumulate(answers, lambda *both: max(both, key=value)))
    for answer in answers:
        place = bisect_right(times, answer.asked - stale_s)
        known = largest[place - 1] if place else answer
        if value(answer) < value(known):
            now, before = words.format(value(answer)), words.format(value(known))
            found.append(f"{answer} {now}, after {known} {before}")
    return found


def _read_through(
    events: Sequence[EventRead], stored: Stored
) -> tuple[list[str], Mapping[str, int]]:
    """Return what is wrong with a reader's events, and the position after the last one."""
    found: list[str] = []
    at = _position(events[0].id) if events[0].name == "hello" else dict.fromkeys(stored, 0)
    for event in events:
        position, kind = _position(event.id), KINDS.get(event.name, "")
        if any(position[each] < at[each] for each in at) or (kind and position == at):
            found.append(f"was told {event.name} {event.id} again, or late, at {event.at:.2f} s")
            continue
        number = position.get(kind, 0) - 1
        skipped = {**position, kind: number} if kind else position
        found += _missing(at, skipped, stored, f"before {event.id}")
        fact = None if kind and number not in stored[kind] else _known(stored, kind, number)
        if fact is None or any(event.fields.get(name) != fact[name] for name in fact):
            found.append(f"was told {event.name} {event.id} as {dict(event.fields)}: it is {fact}")
        at = position
    return found, at


def _known(stored: Stored, kind: str, number: int) -> Mapping[str, Any]:
    """Return what readers have to be told: nothing of what is damaged, or is no event."""
    return stored[kind][number] or {} if kind else {}


def _missing(
    after: Mapping[str, int], until: Mapping[str, int], stored: Stored, when: str
) -> list[str]:
    return [
        f"was not told {kind}{number + 1} {when}"
        for kind, facts in stored.items()
        for number in range(after[kind], until[kind])
        if facts.get(number) is not None
    ]


def _position(text: str) -> dict[str, int]:
    return {kind: int(number) for kind, number in re.findall(r"([a-z])(\d+)", text)}
