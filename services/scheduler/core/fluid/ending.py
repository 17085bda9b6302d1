"""Forecasts how the training of an update ends, and chooses the smallest piece by that.

Small pieces leave less for members to wait for at the end, and every pass costs an overhead,
however few rows it has. So pieces are as small as pays and no smaller: of all sizes, the best is
the one with which list scheduling over the members, as they are now, ends first.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from services.scheduler.core.fluid.fluid_state import EndForecast
from services.scheduler.core.workers import WorkerState

MAX_SCHEDULED_PIECES = 4
"""Pieces per member up to which a schedule is made; of more, the last ends half a piece late."""
END_UNCERTAINTY = 0.03
"""Share of a piece's seconds by which its forecast end is uncertain: members become free earlier or
later than forecast, and a long piece leaves nothing to give to others."""
NUM_BISECTIONS = 8
"""Number of halvings of the interval that the end of a schedule lies in."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """A member that could take a piece."""

    worker: WorkerState
    free_at: float
    group_seconds: float
    """Device time of a whole group; 1 before the first measurement."""
    row_seconds: float
    """Device time of a row, without the overhead of its pass."""
    pass_rows: int
    """Rows of a pass at most; of a shard group, of a rank's."""
    overhead: float
    """Overhead of a pass, in rows."""

    def work(self, rows: float) -> float:
        """Return the number of rows without passes that take as long as a piece of this size."""
        return rows + math.ceil(rows / self.pass_rows) * self.overhead

    def seconds(self, rows: float) -> float:
        return self.work(rows) * self.row_seconds


def best_ending(members: Sequence[Member], left: float, sizes: Sequence[float]) -> EndForecast:
    """Forecast the end of these rows for each candidate size of pieces; return the earliest."""
    left = max(left, min(sizes))
    rate = sum(1 / each.row_seconds for each in members)
    begun = sum(each.free_at / each.row_seconds for each in members)
    usual = sorted(members, key=lambda each: each.pass_rows)[len(members) // 2]
    endings = []
    for rows in sorted(sizes):
        number, work = math.ceil(left / rows - 1e-9), usual.work(rows)
        passes = _num_passes(left / len(members), rows, usual.pass_rows)
        even_end = (left + len(members) * passes * usual.overhead + begun) / rate
        if number > MAX_SCHEDULED_PIECES * len(members):
            end = even_end + len(members) * work / 2 / rate
        else:  # as if all pieces were small, although the first ones are not
            saved = (number * work + begun) / rate - even_end
            end = _scheduled_end(members, rows, number, begun, rate) - max(0.0, saved)
        endings.append(EndForecast(rows, end, even_end))
    return min(endings, key=lambda each: each.at + END_UNCERTAINTY * usual.seconds(each.min_rows))


def _num_passes(share: float, rows: float, pass_rows: int) -> float:
    """Return the number of passes in which a member trains its share of all rows: pieces of half of
    the rest, down to pieces of the smallest size."""
    if rows >= pass_rows:
        return share / rows * math.ceil(rows / pass_rows)
    last = min(share, 2 * rows)
    middle = min(share, 2 * pass_rows)
    return (share - middle) / pass_rows + 2 * math.log(middle / last) + last / rows


def _scheduled_end(
    members: Sequence[Member], rows: float, number: int, begun: float, rate: float
) -> float:
    """Return when all pieces are done, each on the member that finishes it first."""
    each_seconds = [(each.free_at, each.seconds(rows)) for each in members]

    def num_done(at: float) -> int:
        return sum(int((at - free) / each + 1e-9) for free, each in each_seconds if free < at)

    low = (number * rows + begun) / rate
    longest = high = max(each for _, each in each_seconds)
    while num_done(low + high) < number:
        high *= 2
    high += low
    for _ in range(NUM_BISECTIONS + round(math.log2(max(1.0, (high - low) / longest)))):
        middle = (low + high) / 2
        low, high = (low, middle) if num_done(middle) >= number else (middle, high)
    return high
