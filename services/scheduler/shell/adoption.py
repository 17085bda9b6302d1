"""Measures how long versions take from their commit to the devices that generate with them."""

from collections import OrderedDict
from dataclasses import dataclass, field

from shared.messages.workers import WorkerStatus

KEPT = 256
"""Newest versions of which it is known."""


@dataclass(slots=True)
class Lag:
    """Says when rollout workers reported to have loaded a version."""

    committed_at: float
    """Monotonic time, in seconds."""
    first_seconds: float | None = None
    """Seconds from the commit to the first of them."""
    last_seconds: float | None = None
    """Seconds from the commit to the last one so far."""


UNKNOWN = Lag(0.0)


@dataclass(slots=True)
class Adoption:
    """Knows the lags of the newest versions, of the commits and statuses that this scheduler saw.

    A worker counts for a version from its first status with it, so lags are exact to the interval
    of statuses. Trainers have their own version at once and do not count.
    """

    _lags: "OrderedDict[int, Lag]" = field(default_factory=OrderedDict)
    _newest: dict[str, int] = field(default_factory=dict)
    """Newest version that each worker, by address, has reported."""

    def committed(self, version: int, now: float) -> None:
        """Note a commit, at a monotonic time in seconds. Beside fluid devices, workers may have
        loaded the version before."""
        is_early = version in self._newest.values()
        self._lags[version] = Lag(now, 0.0, 0.0) if is_early else Lag(now)
        while len(self._lags) > KEPT:
            self._lags.popitem(last=False)

    def hear(self, status: WorkerStatus, now: float) -> None:
        """Note a status, at a monotonic time in seconds."""
        version = status.policy_version
        if status.service != "rollout" or version is None:
            return
        if self._newest.get(status.address, -1) >= version:
            return
        self._newest[status.address] = version
        lag = self._lags.get(version)
        if lag is not None:
            lag.last_seconds = now - lag.committed_at
            if lag.first_seconds is None:
                lag.first_seconds = lag.last_seconds

    def forget(self, address: str) -> None:
        """Forget a worker that has left."""
        self._newest.pop(address, None)

    def lag(self, version: int) -> Lag:
        """Return the lag of a version; one without figures if it is not known."""
        return self._lags.get(version, UNKNOWN)
