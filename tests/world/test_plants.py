"""Every planted bug shows at its seed, which replays to the same state."""

import pytest

from tests.world.plants import known
from tests.world.sweep import run_seed

CHEAP = ("r2", "r6", "r9")
"""Begin the names of those that are tried each time."""
FOUND = {
    "r1_an_answer_lacks_its_update": (21, "not finished"),
    "r2_rules_and_listings_take_any_folder": (2, "a key of trainer has written"),
    "r3_results_count_whoever_sends_them": (239, "are not trained once"),
    "r6_small_records_have_no_copies": (12, "is damaged"),
    "r9_a_scheduler_that_has_read_nothing_tells_a_step": (1114, "step 0, after"),
    "r11_a_standby_passes_nothing_on": (22, "still follows"),
    "m05_the_version_before_is_deleted_while_it_may_be_used": (42, "is not in the store"),
    "m16_an_empty_register_takes_two_entries": (35, "commands"),
    "a_lost_worker_keeps_its_fragments": (10, "not finished"),
    "a_group_is_finished_with_the_next_version": (6, "scheduler ended: AssertionError"),
    "recovery_skips_the_scores": (1826, "not finished"),
    "what_a_lost_member_had_is_nobodys": (272, "not finished"),
    "the_next_batch_is_trained_before_the_record": (2, "not finished"),
    "a_step_is_ordered_before_all_have_confirmed": (23, "exchanges came to nothing"),
}
"""Seed, and a part of what is found there; `tests.world.plant_search` looks for more."""


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name.startswith(CHEAP) else pytest.mark.slow)
        for name in sorted(FOUND)
    ],
)
def test_a_planted_bug_is_found_and_replayed(name: str) -> None:
    seed, said = FOUND[name]
    first, again = (run_seed(seed, plants=[name]) for _ in range(2))
    assert any(said in each for each in first.violations)
    assert first.digest == again.digest
    assert not any(said in each for each in run_seed(seed).violations)


def test_all_that_is_found_is_planted() -> None:
    assert FOUND.keys() <= known().keys()
