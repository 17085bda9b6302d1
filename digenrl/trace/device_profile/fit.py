"""Seconds of a call by its rows, fitted to calls that were timed: max(host, o + c n).

A call of few rows takes what its host takes to launch its kernels, and as long for two rows as for
one. From some number of rows on the device sets the pace, and each row adds to it.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from digenrl.trace.device_profile.ladder import Rung

MAX_EXTRA_FIT_ERROR = 0.02
"""A fit of the device or the host alone is taken if its largest error is larger by no more."""
HOST_BOUND_FACTOR = 1.1
"""Within this factor of the host's seconds, it is the host that sets the pace."""


@dataclass(frozen=True, slots=True)
class Fit:
    """Seconds of a call of any rows."""

    host: float = 0.0
    """Seconds of the host; 0 if the device set the pace of all calls."""
    call: float = 0.0
    """Fixed seconds of the device: o."""
    row: float = 0.0
    """Its seconds of each row: c; 0 if the host set the pace of all calls."""

    def seconds(self, rows: int) -> float:
        return max(self.host, self.call + self.row * rows)

    def error(self, rungs: Sequence[Rung]) -> float:
        """Returns the largest relative error."""
        return max(abs(self.seconds(rung.rows) / rung.seconds - 1) for rung in rungs)

    def host_bound(self, rungs: Sequence[Rung]) -> int:
        """Returns the rows of the largest call whose pace the host set; 0 if none is."""
        return max((r.rows for r in rungs if r.seconds <= HOST_BOUND_FACTOR * self.host), default=0)


def fit(rungs: Sequence[Rung]) -> Fit:
    """Returns the fit of the device alone or of the host alone if it is about as good as the best
    of both, which has the host's in the smallest calls. A single call determines the rows' cost
    only."""
    fits = sorted(_fit_host_and_device(rungs), key=lambda each: round(each.error(rungs), 3))
    for simple in (_fit_device(0.0, rungs), Fit(host=_middle(rungs))):
        if not fits or simple.error(rungs) <= fits[0].error(rungs) + MAX_EXTRA_FIT_ERROR:
            return simple
    return fits[0]


def _fit_host_and_device(rungs: Sequence[Rung]) -> Iterator[Fit]:
    """Yields fits in which the host sets the pace of the smallest calls: of most calls first, as
    these leave the least to the device's two numbers."""
    for size in range(len(rungs) - 1, 0, -1):
        yield _fit_device(_middle(rungs[:size]), rungs[size:])


def _middle(rungs: Sequence[Rung]) -> float:
    """Returns the seconds of least relative error for all of these calls."""
    seconds = [rung.seconds for rung in rungs]
    return math.sqrt(min(seconds) * max(seconds))


def _fit_device(host: float, rungs: Sequence[Rung]) -> Fit:
    """Returns the fit o + c n, by least squares of relative errors, if it has o >= 0 and c > 0;
    else c n."""
    # (o + c n) / t should be 1: regress a column of ones on 1/t and n/t.
    terms = np.array([(1 / rung.seconds, rung.rows / rung.seconds) for rung in rungs])
    if len(rungs) > 1:
        call, row = np.linalg.lstsq(terms, np.ones(len(rungs)))[0].tolist()
        if call >= 0 and row > 0:
            return Fit(host, call, row)
    per_row = terms[:, 1]
    return Fit(host, 0.0, float(per_row.sum() / (per_row @ per_row)))
