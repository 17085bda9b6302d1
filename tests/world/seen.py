"""Judges what clients of a run were told, whoever answered them. Each rule returns sentences.

An answer may not be older than one that had arrived before it was asked for, and nothing may be
told that the store does not hold.
"""

import re
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

KINDS = {
    "commit": "c", "timeline": "t", "dead_letter": "d", "request": "j", "phase": "j", "alarm": "j",
    "evaluation": "e",
}  # fmt: skip
"""Letter before the number of an event of each name, in the ids of events."""
CALL_LETTERS = {"c": "commit", "t": "timeline", "d": "letter", "j": "entry", "e": "evaluation"}
Stored = Mapping[str, Mapping[int, Mapping[str, Any]]]
"""What the store holds: by the letter of its kind and its number from 0, fields that are told."""


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


@dataclass(frozen=True, slots=True)
class EventRead:
    """Holds a server-sent event; over reconnections, a reader goes on."""

    client: str
    at: float
    id: str
    name: str
    fields: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class FollowerStarted:
    """Says that a client began to follow the run until its end."""

    client: str
    at: float


@dataclass(frozen=True, slots=True)
class FollowerEnded:
    client: str
    at: float
    outcome: str


Observation = Answer | EventRead | FollowerStarted | FollowerEnded


def steps_that_go_back(seen: Iterable[Observation], *, stale_s: float = 0.0) -> list[str]:
    """Find steps smaller than one that somebody knew ``stale_s`` before it was asked for."""
    return _decreases(_answers(seen, "/v1/run"), lambda body: body["step"], "step {}", stale_s)


def ends_that_are_taken_back(seen: Iterable[Observation], *, stale_s: float = 0.0) -> list[str]:
    """Find a run that goes on although it was finished, with as many steps to make."""
    runs: dict[int, list[Answer]] = defaultdict(list)
    for answer in _answers(seen, "/v1/run"):
        runs[answer.body["steps"]].append(answer)
    words = "finished: {}"
    return [
        fault
        for answers in runs.values()
        for fault in _decreases(answers, lambda body: body["phase"] == "finished", words, stale_s)
    ]


def letters_that_go_back(seen: Iterable[Observation], *, stale_s: float = 0.0) -> list[str]:
    """Find lists of all dead letters that end earlier than one before, and letters that change."""
    answers = [each for each in _answers(seen, "/v1/dead-letters") if "state=all" in each.path]

    def newest(body: Sequence[Mapping[str, Any]]) -> int:
        return max((letter["number"] for letter in body), default=0)

    known: dict[int, Any] = {}
    found = _decreases(answers, newest, "dead letter {} as the newest", stale_s)
    for answer in answers:
        for letter in answer.body:
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
            found.append(f"{_told(answer)} step {step}, but version {newest} was the newest")
        elif step < due:
            found.append(
                f"{_told(answer)} step {step}, {answer.asked - commits[due]:.2f} s after version "
                f"{due} was committed"
            )
    return found


def server_errors(seen: Iterable[Observation]) -> list[str]:
    """Find answers that say that a service has failed, and not that it cannot answer now."""
    return [
        f"{_told(each)} {each.status} for {each.path}: {each.body}"
        for each in seen
        if isinstance(each, Answer) and each.status >= 500 and each.status != 503
    ]


def events_out_of_order(
    seen: Iterable[Observation], stored: Stored, alive: Collection[str] = ()
) -> list[str]:
    """Find events that readers were told twice, out of order, wrongly or never.

    Args:
        alive: readers that had the time to read everything.
    """
    readers: dict[str, list[EventRead]] = defaultdict(list)
    for each in seen:
        if isinstance(each, EventRead) and each.id:
            readers[each.client].append(each)
    found = []
    for client, events in readers.items():
        faults, at = _faults_of_reader(events, stored)
        if client in alive:
            ends = {kind: max(facts, default=-1) + 1 for kind, facts in stored.items()}
            faults += _missing(at, {**at, **ends}, stored, "never")
        found += [f"{client} {fault}" for fault in faults]
    return found


def late_followers(
    seen: Iterable[Observation], *, finished: float, now: float, patience_s: float,
    killed: Collection[str] = (),
) -> list[str]:  # fmt: skip
    """Find followers that ended before the run did, or not ``patience_s`` after its last commit."""
    seen = list(seen)
    ended = {each.client: each for each in seen if isinstance(each, FollowerEnded)}
    found = [
        f"{each.client} ended at {each.at:.2f} s with {each.outcome!r}; the run at {finished:.2f} s"
        for each in ended.values()
        if each.at < finished
    ]
    for each in seen:
        waits = isinstance(each, FollowerStarted) and each.client not in (*ended, *killed)
        if waits and now - finished > patience_s:
            found.append(
                f"{each.client} still follows {now - finished:.0f} s after the last commit"
            )
    return found


def _answers(seen: Iterable[Observation], path: str) -> list[Answer]:
    """Return the answers with status 200, in the order of their arrival."""
    found = [each for each in seen if isinstance(each, Answer) and each.status == 200]
    return sorted((each for each in found if each.path.split("?")[0] == path), key=lambda a: a.at)


def _decreases(
    answers: Sequence[Answer], value: Callable[[Any], int], words: str, stale_s: float
) -> list[str]:
    """Find values that are smaller than one that had arrived before they were asked for."""
    largest: list[Answer] = []
    for answer in answers:
        best = largest[-1] if largest and value(largest[-1].body) > value(answer.body) else answer
        largest.append(best)
    times, found = [each.at for each in answers], []
    for answer in answers:
        place = bisect_right(times, answer.asked - stale_s)
        known = largest[place - 1] if place else answer
        if value(answer.body) < value(known.body):
            now, before = (words.format(value(each.body)) for each in (answer, known))
            found.append(f"{_told(answer)} {now}, after {_told(known)} {before}")
    return found


def _told(answer: Answer) -> str:
    return f"{answer.client} was told by {answer.server} at {answer.at:.2f} s"


def _faults_of_reader(
    events: Sequence[EventRead], stored: Stored
) -> tuple[list[str], dict[str, int]]:
    """Return what is wrong with a reader's events, and the position after the last one."""
    found: list[str] = []
    at = _position(events[0].id) if events[0].name == "hello" else dict.fromkeys(stored, 0)
    for event in events:
        position, kind = _position(event.id), KINDS.get(event.name, "")
        if any(position[each] < at[each] for each in at) or (kind and position == at):
            found.append(f"was told {event.name} {event.id} again, or late, at {event.at:.2f} s")
            continue
        number = position.get(kind, 0) - 1
        skipped = {**position, **({kind: number} if kind else {})}
        found += _missing(at, skipped, stored, f"before {event.id}")
        fact = stored[kind].get(number) if kind else {}
        if fact is None or any(event.fields.get(name) != fact[name] for name in fact):
            found.append(f"was told {event.name} {event.id} as {dict(event.fields)}: it is {fact}")
        at = position
    return found, at


def _missing(
    after: Mapping[str, int], until: Mapping[str, int], stored: Stored, when: str
) -> list[str]:
    return [
        f"was not told {CALL_LETTERS[kind]} {number} {when}"
        for kind, facts in stored.items()
        for number in range(after[kind], until[kind])
        if number in facts
    ]


def _position(text: str) -> dict[str, int]:
    return {kind: int(number) for kind, number in re.findall(r"([a-z])(\d+)", text)}
