"""The smallest piece is as small as pays: forecasts of the end of a batch's training."""

import pytest

from services.scheduler.core.fluid.ending import Member, best_ending
from services.scheduler.core.tag.estimates import PassCosts
from services.scheduler.core.workers import WorkerState

PASS = 16
SIZES = [1.0, 2.0, 4.0, 8.0, 16.0, 32.0]


def members(number: int, overhead: float, free_at: tuple[float, ...] = (0.0,)) -> list[Member]:
    return [
        Member(
            worker=WorkerState(address=f"m{n}", name=f"m{n}", service="trainer", concurrency=1),
            free_at=free_at[n % len(free_at)], group_seconds=32.0 + 2 * overhead, row_seconds=1.0,
            pass_rows=PASS, overhead=overhead,
        )
        for n in range(number)
    ]  # fmt: skip


@pytest.mark.parametrize(("overhead", "rows"), [(0.0, 1.0), (1.0, 4.0), (30.0, 16.0)])
def test_the_last_pieces_are_small_only_where_passes_cost_little(
    overhead: float, rows: float
) -> None:
    late = tuple(1.7 * n for n in range(8))
    assert best_ending(members(8, overhead, late), 256.0, SIZES).min_rows == rows


def test_as_many_passes_as_members_are_one_piece_each() -> None:
    found = best_ending(members(64, overhead=1.0), 64.0 * PASS, SIZES)
    assert found.min_rows == PASS
    assert found.at == pytest.approx(PASS + 1.0, rel=0.01)


@pytest.mark.parametrize("host_rows", [0.0, 2.0, 12.0])
def test_overhead_is_learned_from_pieces_of_several_sizes_on_members_of_any_speed(
    host_rows: float,
) -> None:
    costs = PassCosts(usual_rows=PASS)
    for number in range(60):
        rows = (32, 16, 6, 4, 2)[number % 5]
        passes, speed = -(-rows // PASS), 1 + number % 3
        seconds = (rows + host_rows * passes) / speed
        costs = costs.observe(f"m{number % 3}", rows, PASS, seconds)
    assert costs.is_known
    assert costs.overhead_rows == pytest.approx(host_rows, abs=0.15 * (1 + host_rows))


def test_passes_that_keep_the_host_busy_count_as_much_however_few_their_rows() -> None:
    costs = PassCosts(usual_rows=PASS)
    for number in range(60):
        rows = (16, 8, 4, 2)[number % 4]
        costs = costs.observe("m", rows, PASS, seconds=max(1.0, 0.0625 * rows))
    assert costs.overhead_rows > 2 * PASS


def test_members_report_how_many_rows_fit() -> None:
    costs = PassCosts(usual_rows=PASS).observe("m", 8, 4, seconds=1.0)
    assert (costs.rows_of("m"), costs.rows_of("other")) == (4, PASS)
    assert costs.only_of(()).rows_of("m") == PASS
