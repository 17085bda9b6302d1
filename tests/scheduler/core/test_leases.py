"""Who is alive, and which of two workers has a name."""

from services.scheduler import limits
from services.scheduler.core.leases import Leases
from shared.limits import ACK_WAIT_S


def test_of_two_living_workers_of_one_name_the_first_keeps_it() -> None:
    leases = Leases()
    assert leases.hear("a-1", "a", 0.0) == "joined"
    heard = []
    for second in range(5):
        assert leases.hear("a-1", "a", second + 0.1) == "known"
        heard.append(leases.hear("a-2", "a", second + 0.5))
    assert heard == ["waits", "waits", "refused", "refused", "refused"]
    assert leases.end(5.0) == []


def test_a_worker_that_is_started_again_takes_the_place_of_the_silent_one() -> None:
    leases = Leases()
    leases.hear("a-1", "a", 0.0)
    assert leases.hear("a-2", "a", 1.0) == "waits"
    assert leases.hear("a-2", "a", limits.NAME_TAKEOVER_S) == "joined"
    assert leases.hear("a-1", "a", limits.NAME_TAKEOVER_S + 0.1) == "waits", (
        "a zombie does not get it back"
    )
    assert leases.hear("a-2", "a", limits.NAME_TAKEOVER_S + 1.0) == "known"


def test_a_worker_whose_predecessor_is_silent_joins_at_once() -> None:
    leases = Leases()
    leases.hear("a-1", "a", 0.0)
    assert leases.hear("a-2", "a", 4.0) == "joined"


def test_a_silent_worker_has_left_after_its_lease_and_only_then() -> None:
    leases = Leases()
    leases.hear("a-1", "a", 0.0)
    leases.hear("b-1", "b", 3.0)
    assert leases.end(limits.LEASE_S - 0.1) == []
    assert leases.end(limits.LEASE_S + 0.1) == ["a-1"]
    assert leases.hear("a-1", "a", 6.0) == "joined"


def test_a_worker_that_had_work_before_a_restart_and_lost_its_name_has_left() -> None:
    """Its work is not forgotten because its successor was heard first."""
    leases = Leases()
    leases.expect(["a-1"], 0.0)
    leases.hear("a-2", "a", 0.1)
    for second in range(1, 5):
        leases.hear("a-2", "a", float(second))
        leases.hear("a-1", "a", float(second))
    assert leases.end(limits.LEASE_S + 0.1) == ["a-1"]


def test_no_lease_counts_the_time_in_which_nobody_could_be_heard() -> None:
    leases = Leases()
    leases.expect(["b-1"], 0.0)
    leases.hear("a-1", "a", 0.0)
    leases.prolong(12.0)
    assert leases.end(12.5) == []
    assert sorted(leases.end(17.5)) == ["a-1", "b-1"]


def test_shared_work_of_a_dead_worker_is_given_anew_no_later_than_work_that_was_assigned() -> None:
    assert ACK_WAIT_S <= limits.LEASE_S
