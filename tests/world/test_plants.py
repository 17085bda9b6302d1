"""Every planted bug shows at its seed, which replays to the same state."""

import pytest

from tests.world.plants import known
from tests.world.sweep import run_seed

CHEAP = ("r2", "r6", "r9")
"""Begin the names of those that are tried each time."""
FOUND = {
    "nothing_begins_again": (22, "not finished"),
    "m14_a_sum_that_lacks_a_share_ends_its_reader": (685, "KeyError"),
    "r3_results_count_whoever_sends_them": (349, "are not trained once"),
    "r1_an_answer_lacks_its_update": (21, "not finished"),
    "r2_rules_and_listings_take_any_folder": (22, "has written"),
    "r6_small_records_have_no_copies": (33, "has no copy"),
    "r9_a_scheduler_that_has_read_nothing_tells_a_step": (424, "step 0, after"),
    "r11_a_standby_passes_nothing_on": (16, "still follows"),
    "m02_after_vain_rounds_the_missed_stay": (97, "not finished"),
    "m05_the_version_before_is_deleted_while_it_may_be_used": (62, "is not in the store"),
    "m11_a_scheduler_commands_after_its_lease_has_ended": (1329, "commands"),
    "m16_an_empty_register_takes_two_entries": (37, "commands"),
    "slots_take_any_number_of_messages": (162, "takes a second message"),
    "a_lost_worker_keeps_its_fragments": (28, "not finished"),
    "a_failed_fragment_is_issued_under_the_same_attempt": (26, "not finished"),
    "nobody_checks_the_staleness_of_tasks": (42, "not finished"),
    "a_group_is_finished_with_the_next_version": (59, "ended: AssertionError"),
    "recovery_skips_the_scores": (3, "not finished"),
    "a_step_is_ordered_before_all_have_confirmed": (28, "came to nothing"),
    "what_a_lost_member_had_is_nobodys": (131, "not finished"),
    "a_piece_keeps_its_number": (226, "not finished"),
    "the_next_batch_is_trained_before_the_record": (25, "not finished"),
    "nobody_else_commits": (413, "not finished"),
    "an_exchange_has_no_deadline": (322, "not finished"),
    "rewards_are_acknowledged_before_they_are_published": (35, "not finished"),
    "a_share_is_counted_twice": (170, "not finished"),
    "a_sum_is_exchanged_whatever_is_in_it": (226, "not finished"),
    "a_member_that_differs_goes_on": (170, "not finished"),
    "a_commit_names_only_what_samples": (121, "trained to others"),
    "a_member_takes_a_second_sum": (162, "not finished"),
    "gradients_are_taken_at_whatever_weights_there_are": (51, "are not trained once"),
    "an_update_is_trained_at_the_weights_before": (52, "trained to others"),
    "nobody_checks_the_staleness_of_tasks+members_admit_anything": (13, "has a staleness of 1"),
    "a_device_that_hangs_keeps_its_fragments+nobody_checks_the_staleness_of_tasks": (
        33,
        "not finished",
    ),
    "a_share_is_counted_twice+an_early_fragment_is_generated_by_the_new_version": (
        84,
        "are not trained once",
    ),
}
"""Seed, and a part of what is found there; `tests.world.plant_search` looks for more. Bugs with `+`
between them show only together: each makes up for the other."""


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name.startswith(CHEAP) else pytest.mark.slow)
        for name in sorted(FOUND)
    ],
)
def test_a_planted_bug_is_found_and_replayed(name: str) -> None:
    seed, said = FOUND[name]
    first, again = (run_seed(seed, plants=name.split("+")) for _ in range(2))
    assert any(said in each for each in first.violations)
    assert first.digest == again.digest
    assert not any(said in each for each in run_seed(seed).violations)


def test_all_that_is_found_is_planted() -> None:
    assert {name for names in FOUND for name in names.split("+")} <= known().keys()
