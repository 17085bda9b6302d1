"""Every row of the performance tables, and a few of them to see what has moved."""

from collections.abc import Sequence

from bench.cluster.row_runs import Length
from bench.cluster.rows import ROWS, Row, row_of

QUICK = ("qwen-image-32-on-policy", "qwen-image-16-l40s-16-on-policy")
"""The workload with the most messages: with fluid devices alone, and beside generating hosts."""
QUICK_LENGTH = Length(rounds=1, batches=2, one_step_batches=4)
FULL_LENGTH = Length()


def suite(*, quick: bool) -> tuple[Sequence[Row], Length]:
    """Returns the rows, and how much is measured of each."""
    if quick:
        return [row_of(name) for name in QUICK], QUICK_LENGTH
    return ROWS, FULL_LENGTH
