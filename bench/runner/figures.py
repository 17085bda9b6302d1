"""From what was seen of a run to figures of its measured batches."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, NamedTuple, TypeVar

from bench.runner.watch import Sample
from shared.run.usage import BUSY_USES, BatchUsage

Use = Literal["generate", "train", "score", "commit", "adopt", "exchange", "snapshot"]
Key = TypeVar("Key", bound=str)


class Interval(NamedTuple):
    """A device in use; seconds of the machine's monotonic clock, which all processes share."""

    device: str
    use: Use
    begin: float
    end: float
    samples: float = 0.0
    """Samples that were made in it, or the part of them that was."""

    def within(self, begin: float, end: float) -> float:
        """Returns how many of its seconds lie between two times."""
        return max(0.0, min(self.end, end) - max(self.begin, begin))


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRecord:
    """What was seen of one run."""

    commits: Sequence[float]
    """When each version was announced, the first one first."""
    begin: Sample
    """What processes had used at the first of the two commits at which they were looked at."""
    end: Sample
    usage: Sequence[BatchUsage]
    intervals: Sequence[Interval]

    @property
    def cores(self) -> dict[str, float]:
        """Cores that each process kept busy between both samples."""
        seconds = self.end.at - self.begin.at
        return {
            name: (used - self.begin.cpu[name]) / seconds for name, used in self.end.cpu.items()
        }


@dataclass(frozen=True, slots=True)
class Window:
    """The measured part of a run, from the announcement of one version to that of another.

    A device, or a pool of them, is meant by how the names of its workers begin.
    """

    run: RunRecord
    first: int
    last: int

    @property
    def begin(self) -> float:
        return self.run.commits[self.first]

    @property
    def end(self) -> float:
        return self.run.commits[self.last]

    @property
    def num_batches(self) -> int:
        return self.last - self.first

    @property
    def batch_seconds(self) -> list[float]:
        """Seconds of each batch, from commit to commit."""
        commits = self.run.commits[self.first : self.last + 1]
        return [after - before for before, after in pairwise(commits)]

    def samples(self, pool: str, use: Use) -> float:
        """Counts samples, those under way at its ends in proportion."""
        return samples_between(
            [each for each in self._of(pool) if each.use == use], self.begin, self.end
        )

    def shares(self, pool: str, num_devices: int = 1) -> dict[str, float]:
        """Returns use -> share of the pool's device-seconds; unused ones are left out."""
        shares: defaultdict[str, float] = defaultdict(float)
        for each in self._of(pool):
            spent = each.within(self.begin, self.end)
            shares[each.use] += spent / (self.end - self.begin) / num_devices
        return dict(shares)

    def devices(self, pool: str) -> set[str]:
        return {each.device for each in self._of(pool)}

    def waits(self, pool: str) -> dict[str, float]:
        """Returns cause -> share of the pool's device-seconds, as the scheduler saw it."""
        spent: defaultdict[str, float] = defaultdict(float)
        for batch in self.run.usage:
            if self.first <= batch.batch < self.last:
                for name, uses in batch.devices.items():
                    for use, seconds in uses.items() if name.startswith(pool) else ():
                        spent[use] += seconds
        total = sum(spent.values())
        return {use: seconds / total for use, seconds in spent.items() if use not in BUSY_USES}

    def _of(self, pool: str) -> list[Interval]:
        return [each for each in self.run.intervals if each.device.startswith(pool)]


def samples_between(intervals: Sequence[Interval], begin: float, end: float) -> float:
    """Counts the samples made between two times, those under way in proportion."""
    return sum(
        each.samples * each.within(begin, end) / (each.end - each.begin)
        for each in intervals
        if each.samples
    )


def means(tables: "Sequence[Mapping[Key, float]]") -> dict[str, float]:
    """Returns the mean of each key; one that a table does not have counts as 0 there."""
    keys = sorted({key for table in tables for key in table})
    return {key: sum(table.get(key, 0.0) for table in tables) / len(tables) for key in keys}
