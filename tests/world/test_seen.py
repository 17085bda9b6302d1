"""One observation that breaks each rule, and none that is only unlucky."""

from collections.abc import Sequence
from typing import Any

import pytest

from tests.world import seen
from tests.world.seen import Answer, EventRead, Followed, Stored


def run(asked: float, at: float, step: int, phase: str = "running", steps: int = 9) -> Answer:
    body = {"step": step, "phase": phase, "steps": steps}
    return Answer("ann", asked, at, "a:1", "/v1/run", 200, body)


def letters(asked: float, *numbers: int, reason: str = "no") -> Answer:
    body = [dict(number=each, kind="failed", subject="s", reason=reason) for each in numbers]
    return Answer("ann", asked, asked, "a:1", "/v1/dead-letters?state=all", 200, body)


def test_a_step_may_not_be_older_than_one_that_was_known_when_it_was_asked_for() -> None:
    unlucky = [run(0, 1, 3), run(0.5, 2, 2), run(3, 4, 3)]  # the second was asked before the first
    assert seen.steps_that_go_back(unlucky) == []
    fault = run(5, 6, 0)
    assert seen.steps_that_go_back([*unlucky, fault]) == [
        "ann was told by a:1 at 6.00 s step 0, after ann was told by a:1 at 1.00 s step 3"
    ]
    assert seen.steps_that_go_back([*unlucky, fault], stale_s=4.5) == []
    assert seen.steps_that_go_back([run(0, 1, 3), Answer("b", 2, 3, "", "/v1/run", 503, {})]) == []


def test_a_run_that_is_finished_stays_so_unless_it_is_given_more_steps() -> None:
    first = run(0, 1, 9, "finished")
    assert seen.ends_that_are_taken_back([first, run(2, 3, 9, "running", steps=12)]) == []
    assert len(seen.ends_that_are_taken_back([first, run(2, 3, 9)])) == 1


def test_dead_letters_keep_their_numbers() -> None:
    assert seen.letters_that_go_back([letters(0, 1), letters(1, 2, 1), letters(2, 2)]) == []
    assert len(seen.letters_that_go_back([letters(0, 2, 1), letters(1, 1)])) == 1
    [changed] = seen.letters_that_go_back([letters(0, 1), letters(1, 1, reason="else")])
    assert "dead letter 1" in changed


def test_a_step_is_told_when_it_is_committed_and_not_long_after() -> None:
    commits = [0.0, 10.0, 20.0]
    fine = [run(9, 9, 0), run(12, 12, 0), run(12, 12, 1), run(40, 40, 2)]
    assert seen.steps_against_commits(fine, commits, late_s=5) == []
    faults = [run(9, 9, 1), run(16, 16, 0)]
    early, late = seen.steps_against_commits(faults, commits, late_s=5)
    assert "version 0 was the newest" in early and "6.00 s after the commit of version 1" in late


def test_a_service_may_say_that_it_cannot_answer_but_not_fail() -> None:
    answers = [Answer("b", 0, 1, "", "/v1/run", status, {}) for status in (200, 404, 503, 500)]
    assert len(seen.server_errors(answers)) == 1


STORED: Stored = {
    "c": {0: {"version": 0}, 1: {"version": 1}, 2: {"version": 2}},
    "l": {0: {}}, "e": {},
}  # fmt: skip


def read(*events: tuple[int, int, str]) -> list[EventRead]:
    """Events by the numbers in their ids; a commit is of the version that its id says."""
    return [
        EventRead("bob", 1.0, f"c{commits}.l{entries}.e0", name, {"version": commits - 1})
        for commits, entries, name in events
    ]


WHOLE = ((0, 0, "hello"), (1, 0, "commit"), (1, 1, "phase"), (2, 1, "commit"), (3, 1, "commit"))


@pytest.mark.parametrize(
    ("events", "fault"),
    [
        (WHOLE, ""),
        ((*WHOLE[:3], (1, 1, "hello"), *WHOLE[3:]), ""),  # connected again
        ((*WHOLE[:2], *WHOLE[1:]), "again"),
        ((*WHOLE[:3], (0, 0, "hello")), "again"),
        ((*WHOLE[:3], *WHOLE[4:]), "was not told c2 before c3"),
        ((*WHOLE[:2], (2, 1, "commit"), WHOLE[4]), "was not told l1 before c2"),
        ((*WHOLE, (4, 1, "commit")), "it is None"),  # the store lost it
        (WHOLE[:4], "was not told c3 never"),
    ],
)
def test_a_reader_is_told_each_event_once(
    events: Sequence[tuple[int, int, str]], fault: str
) -> None:
    found = seen.events_out_of_order(read(*events), STORED, alive=["bob"])
    assert fault in " ".join(found) if fault else found == []


def test_an_event_has_the_fields_that_are_stored() -> None:
    events: Any = read(*WHOLE)
    stored = {**STORED, "c": {**STORED["c"], 1: {"version": 1, "weights_digest": "ab"}}}
    [fault] = seen.events_out_of_order(events, stored)
    assert "c2.l1" in fault
    assert seen.events_out_of_order(read(*WHOLE[:4]), STORED) == []  # it has died, or has time


def test_a_follower_ends_with_its_run() -> None:
    began = Followed("up", 0.0)
    late, early = Followed("up", 70.0, "finished"), Followed("up", 9.0, "finished")

    def faults(*observations: seen.Observation, now: float = 100.0) -> list[str]:
        return seen.late_followers(observations, finished=60.0, now=now, patience_s=30.0)

    assert faults(began, late) == faults(began, now=80.0) == []
    assert faults(began) == ["up still follows 40 s after the last commit"]
    assert faults(began, early) == ["up ended at 9.00 s with 'finished'; the run at 60.00 s"]
    killed = seen.late_followers([began], finished=60, now=100, patience_s=30, killed=["up"])
    assert killed == []
