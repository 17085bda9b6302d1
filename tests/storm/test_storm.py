"""A short storm over all services and brokers, and what the commit records say afterwards."""

import os
from collections import Counter
from pathlib import Path

import pytest

from shared.learning.algorithms import DEFAULT
from tests.storm.faults import ALL_KINDS, Fault, faults
from tests.storm.small import NAME
from tests.storm.storm import LAGGED, possible, through

pytestmark = [pytest.mark.run, pytest.mark.timeout(150)]

EVERYTHING = [
    "nats", "valkey", "objects", "scheduler", "rollout-0", "rollout-1", "rollout-2", "encoder-0",
    "reward-0", "reward-1", "trainer-h100-0", "trainer-h100-1",
]  # fmt: skip
NUM_FAULTS = 4 * len(EVERYTHING)


@pytest.mark.slow
async def test_four_kills_and_stops_of_each_process_lose_nothing_and_train_nothing_twice(
    tmp_path: Path,
) -> None:
    """The run has two optimizer steps per batch, shared noise, and other weights that generate than
    those that are trained."""
    storm = await through(tmp_path, seed=1, number=NUM_FAULTS, **LAGGED)
    assert storm.violations == []
    assert Counter(fault.target for fault in storm.faults) == dict.fromkeys(EVERYTHING, 4)
    assert storm.fragments_by_trainer > 0
    assert sum(storm.deaths.values()) >= NUM_FAULTS / 2


@pytest.mark.slow
@pytest.mark.parametrize("seed", [2, 3, 4])
@pytest.mark.parametrize("max_staleness", [0, 1])
@pytest.mark.parametrize("nft_decay", [0, 1])
async def test_other_storms_lose_nothing_either(
    seed: int, max_staleness: int, nft_decay: int, tmp_path: Path
) -> None:
    name = NAME if nft_decay else DEFAULT
    keys = {"algorithm.name": name, "algorithm.nft_decay": nft_decay}
    storm = await through(tmp_path, seed, NUM_FAULTS, keys=keys, max_staleness=max_staleness)
    assert storm.violations == []


@pytest.mark.slow
@pytest.mark.timeout(400)
async def test_a_storm_of_all_kinds_with_two_schedulers(tmp_path: Path) -> None:
    kinds = dict.fromkeys(ALL_KINDS, 1)
    storm = await through(tmp_path, 5, 60, kinds=kinds, gap=2.0, standby=True)
    assert storm.violations == []
    assert {fault.kind for fault in storm.faults} == set(possible(ALL_KINDS))
    is_less = possible(ALL_KINDS) != ALL_KINDS
    assert not (is_less and os.environ.get("CI")), "CI runs as root, and leaves nothing out"


def test_a_storm_is_a_function_of_its_seed() -> None:
    def planned(seed: int) -> list[Fault]:
        return faults(seed, NUM_FAULTS, EVERYTHING)

    assert planned(1) == planned(1) != planned(2)
    assert {fault.kind for fault in planned(1)} == {"kill", "terminate", "freeze"}


def test_a_long_storm_has_every_kind_of_fault_and_more_than_500_kills() -> None:
    planned = faults(2, 700, [*EVERYTHING, "scheduler-1"], ALL_KINDS)
    counts = Counter(fault.kind for fault in planned)
    assert set(counts) == set(ALL_KINDS)
    assert counts["kill"] + counts["wipe"] >= 500
