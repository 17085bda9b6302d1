"""Two schedulers at a time in virtual time, beside all other faults."""

import os
from collections import Counter

import pytest

from tests.faults.planting import Mutant
from tests.faults.takeovers import TAKEOVER_MUTANTS, run_takeovers

NUM_SEEDS = int(os.environ.get("DIGENRL_TAKEOVER_SEEDS", "15"))
CAUGHT_WITHIN = 100
MANY, CHUNK = int(os.environ.get("DIGENRL_FAULT_SEEDS", "2000")), 500
"""Schedules of all tests, 10,000 in `make test-all`, and of one of them."""


def swept(first: int, count: int) -> Counter[str]:
    met, failures = Counter[str](), list[str]()
    for seed in range(first, first + count):
        outcome = run_takeovers(seed)
        met.update(outcome.coverage)
        if outcome.violations or not outcome.finished:
            failures.append(f"seed {seed}: {'; '.join(outcome.violations[:3]) or 'not finished'}")
    assert failures == []
    return met


def test_schedulers_that_replace_each_other_break_nothing() -> None:
    met = swept(0, NUM_SEEDS)
    assert met["scheduler replaced"]
    assert met["command refused"], "a scheduler that was replaced has sent something"


@pytest.mark.slow
@pytest.mark.parametrize("first", range(1000, 1000 + MANY, CHUNK))
def test_many_takeovers_break_nothing(first: int) -> None:
    swept(first, CHUNK)


@pytest.mark.parametrize("mutant", TAKEOVER_MUTANTS, ids=lambda mutant: mutant.__name__)
def test_a_planted_bug_is_caught(mutant: Mutant) -> None:
    for seed in range(CAUGHT_WITHIN):
        outcome = run_takeovers(seed, mutant())
        if outcome.violations or not outcome.finished:
            return
    pytest.fail(f"not caught by {CAUGHT_WITHIN} schedules")
