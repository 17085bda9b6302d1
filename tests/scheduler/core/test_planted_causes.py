"""Each measured cause of runs that slow lines stopped or slowed, planted again, fails a test."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from services.scheduler.core import assign, device_queues, participation
from services.scheduler.core.fluid import rounds
from services.scheduler.core.state import State
from shared.messages.fluid import ExchangeSums, Share
from shared.store.relay import Peer
from shared.store.traffic import Pace
from tests.scheduler.core import test_participation as lines
from tests.scheduler.core import test_slow_lines as limits
from tests.shared.store import test_relay
from tests.shared.store.hosts import Counting


def most_pieces(_state: State, _fluid: object, shares: Sequence[Share]) -> str:
    return max(shares, key=lambda share: (len(share.pieces), share.worker)).worker


void_missed = rounds._void_missed


def accuse_all(fluid: Any, exchange: Any, silent: frozenset[str]) -> Any:
    """Whoever is missed by somebody is out, the committer as well."""
    missed = {each for names in exchange.missed.values() for each in names}
    return replace(void_missed(fluid, exchange, silent), out=fluid.out | silent | missed)


def never_by_store(**fields: Any) -> ExchangeSums:
    """A process group exchanges sums over slow lines and after a round without a total."""
    return ExchangeSums(**fields | {"by_store": False})


known_rates = participation._rates


CAUSES: dict[str, tuple[Sequence[tuple[Any, str, Any]], Callable[[], None]]] = {
    "a round has 60 s, whatever its bytes": (
        [(rounds, "max_seconds", lambda *_: 60.0)],
        limits.test_a_round_s_limit_follows_from_its_bytes_and_the_slowest_line,
    ),
    "a committer that has answered is out": (
        [(rounds, "_void_missed", accuse_all)],
        limits.test_a_committer_that_was_too_slow_is_not_named_again_while_there_are_others,
    ),
    "attempts are not counted": (
        [(rounds, "_end_vain_run", lambda state: state)],
        limits.test_attempts_that_nobody_s_death_explains_fail_the_run_in_one_line,
    ),
    "the member with most pieces commits": (
        [(rounds, "choose_committer", most_pieces)],
        limits.test_the_committer_is_whose_version_leaves_soonest_and_pieces_break_ties,
    ),
    "a process group names nobody": (
        [(rounds, "ExchangeSums", never_by_store)],
        lambda: limits.test_a_slow_line_never_stops_a_run(1, 40.0, 50, True),
    ),
    "no work is declined": (
        [(participation, "decide", lambda plan, state: state)],
        lambda: lines.test_after_the_first_batch_far_devices_make_none_slower(
            lines.FLUX, 8, 8, 30, {}
        ),
    ),
    "late devices are counted from the start": (
        [
            (
                participation,
                "_rates",
                lambda every, _: known_rates(every, {e.worker.address for e in every}),
            )
        ],
        lambda: lines.test_late_devices_generate_if_they_gain_enough(14, False),
    ),
    "schedules start when a version is published": (
        [(each, "weights_wait", lambda *_: 0.0) for each in (assign, device_queues)],
        lines.test_schedules_start_when_weights_are_there,
    ),
    "a slow host serves other sites": (
        [(Peer, "is_source", lambda *_: True)],
        test_relay.test_a_host_serves_another_site_only_over_a_line_at_least_as_fast_as_the_store,
    ),
}


@pytest.mark.parametrize("cause", CAUSES)
def test_a_planted_cause_is_caught(cause: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plants, test = CAUSES[cause]
    for module, name, planted in plants:
        monkeypatch.setattr(module, name, planted)
    with pytest.raises(AssertionError):
        test()


async def test_hosts_of_a_site_that_each_read_from_the_store_are_caught(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(Peer, "is_source", lambda *_: False)
    with pytest.raises(AssertionError):
        await test_relay.test_one_host_of_each_site_reads_from_the_store(
            Counting(tmp_path / "objects"), tmp_path
        )


@pytest.mark.slow
def test_a_slow_source_that_is_never_left_is_caught(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(Pace, "is_slow", lambda *_: False)
    name = "test_a_source_slower_than_half_of_the_store_costs_a_second_and_what_it_gave_is_kept"
    with pytest.raises(AssertionError):
        asyncio.run(getattr(test_relay, name)(Counting(tmp_path / "objects"), tmp_path, "far"))
