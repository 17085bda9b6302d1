"""Worlds: the real services of a run under faults, in virtual time, from one seed each."""

import os
import subprocess
import sys
from collections.abc import Collection

import pytest

from tests.world import sweep
from tests.world.faults import Fault
from tests.world.run import Outcome
from tests.world.sweep import run_seed, shortened

NUM_SEEDS = int(os.environ.get("DIGENRL_WORLD_SEEDS", "45"))
CHUNK = 5
REPLAYED = 3
DIGESTS = (
    "from tests.world.sweep import run_seed\n"
    f"for seed in range({REPLAYED}): print(run_seed(seed).digest)\n"
)


CHUNKS = [
    pytest.param(first, marks=pytest.mark.xdist_group(f"worlds from {first}"))
    for first in range(0, NUM_SEEDS, CHUNK)
]
"""Any process may take one: they are most of what this file takes."""


@pytest.mark.parametrize("first", CHUNKS)
def test_no_world_breaks_a_rule_or_stands_still(first: int) -> None:
    told = [_told(seed) for seed in range(first, min(first + CHUNK, NUM_SEEDS))]
    assert [each for each in told if each] == []


def _told(seed: int) -> str:
    """Return what is wrong with a world, the faults that are needed for it, and how to see it."""
    outcome = run_seed(seed)
    if outcome.is_well:
        return ""
    faults = ", ".join(f"{each.at:.3f} s {each}" for each in shortened(outcome).faults)
    replay = f"python -m tests.world {seed} --shorter"
    return f"seed {seed}: {'; '.join(outcome.violations)}. Needs: {faults or 'no fault'}. {replay}"


def test_the_same_seed_gives_the_same_log_in_any_process() -> None:
    environment = {**os.environ, "PYTHONHASHSEED": "12345", "PYTHONPATH": os.pathsep.join(sys.path)}
    elsewhere = subprocess.run(
        [sys.executable, "-c", DIGESTS], env=environment, capture_output=True, text=True, check=True
    ).stdout.split()
    assert [run_seed(seed).digest for seed in range(REPLAYED)] == elsewhere
    assert len(set(elsewhere)) == REPLAYED


def test_a_shorter_schedule_has_only_the_faults_that_are_needed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    faults = tuple(Fault(number, float(number), "kill", "trainer") for number in range(10))

    def ran(seed: int, *, kept: Collection[int], plants: Collection[str]) -> Outcome:
        bad = {3, 7} <= set(kept)
        struck = tuple(each for each in faults if each.number in kept)
        return Outcome(seed, ("wrong",) if bad else (), struck, "", 0.0, 0.0, ())

    monkeypatch.setattr(sweep, "run_seed", ran)
    found = shortened(Outcome(1, ("wrong",), faults, "", 0.0, 0.0, ()))
    assert [each.number for each in found.faults] == [3, 7]


def test_a_world_that_ends_with_an_error_of_its_own_is_a_violation(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise ValueError("draws nothing")

    monkeypatch.setattr(sweep, "live", fail)
    monkeypatch.setattr(sweep, "_warm", lambda: None)
    [violation] = run_seed(0).violations
    assert "draws nothing" in violation
