"""Learns online what work costs: running median of three, then an exponential average."""

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any, Literal

from services.scheduler.core.tag.line_costs import LineCosts
from services.scheduler.core.tag.running_median import Estimate as Estimate

SharedCost = Literal["switch", "ready", "commit", "sample_bytes"]
"""Cost that is one for all devices."""

MAX_DEPARTED_WORKERS = 64
"""Estimates of departed workers that are kept in any case: a guide to what others take."""
MIN_SIZE_VARIATION = 1.0
"""Sum of squared relative distances of sizes after which the overhead counts as known: noise of 3 %
then leaves an error of 4 % of a mean fragment."""
MEMORY = 1 / 256
"""Weight of the newest observation of two sizes, once there are many."""
MEAN_WEIGHT = 0.1
"""Weight of a device's newest fragment in its mean."""
MAX_OUTLIER_SHARE = 0.2
"""How far a fragment's relative seconds count beyond what its size explains."""
MAX_OVERHEAD_GROUPS = 4.0
"""Largest overhead, in groups: what seems to take longer does not depend on the samples at all."""


@dataclass(frozen=True, slots=True)
class MeanFragment:
    """Averages a device's fragments."""

    samples: float
    seconds: float
    count: int = 1

    def relative(self, samples: float, seconds: float) -> float:
        """Return how much longer than the mean a fragment took, in parts of the mean."""
        apart = samples / self.samples - 1
        least, most = min(apart, 0.0) - MAX_OUTLIER_SHARE, max(apart, 0.0) + MAX_OUTLIER_SHARE
        return min(most, max(least, seconds / self.seconds - 1))

    def observe(self, samples: float, seconds: float) -> "MeanFragment":
        """Restart when a fragment took less than half of the minimum that the mean allows: a
        device's first fragments are slow."""
        if seconds < 0.5 * self.seconds * min(1.0, samples / self.samples):
            return MeanFragment(samples, seconds)
        weight = max(MEAN_WEIGHT, 1 / (self.count + 1))
        return MeanFragment(
            self.samples + weight * (samples - self.samples),
            self.seconds * (1 + weight * self.relative(samples, seconds)),
            self.count + 1,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Overhead:
    """Learns the overhead of a fragment: o of o + c n, in samples, as o / c.

    A device that takes v (r + n) seconds for n samples, and on average t for m of them, takes t y
    more for n, with y (r + m) = n - m. Devices of any speed therefore give the same r, if they
    generate fragments of several sizes: the r for which u (y (r + m) - (n - m)) / m adds up to 0, u
    = (n - m) / m. Noise is in y alone, so it does not shift r.
    """

    evidence: float = 0.0
    """Sum of u squared."""
    products: float = 0.0
    """Sum of u y."""
    per_sample: float = 0.0
    """Sum of u y / m."""

    @classmethod
    def known_after(cls, samples: float) -> "Overhead":
        """Return an overhead of this many samples as if it had been learned from many fragments."""
        weight = MIN_SIZE_VARIATION / MEMORY
        level = weight / (samples + 1)
        return cls(evidence=weight, products=level, per_sample=level)

    def observe(self, mean: MeanFragment, samples: float, seconds: float) -> "Overhead":
        """Add a fragment after the earlier fragments of its device."""
        apart = samples / mean.samples - 1
        product, kept = apart * mean.relative(samples, seconds), 1 - MEMORY
        return Overhead(
            evidence=kept * self.evidence + apart * apart,
            products=kept * self.products + product,
            per_sample=kept * self.per_sample + product / mean.samples,
        )

    @property
    def is_known(self) -> bool:
        return self.evidence >= MIN_SIZE_VARIATION

    def samples(self, group_size: int) -> float | None:
        """Return r; None while fragments were too similar to determine it."""
        if not self.is_known:
            return None
        most = MAX_OVERHEAD_GROUPS * group_size
        if self.per_sample <= 0:
            return most
        return min(most, max(0.0, (self.evidence - self.products) / self.per_sample))


@dataclass(frozen=True, slots=True, kw_only=True)
class PassCosts:
    """Learns what training takes as a function of rows: o + c r seconds for a pass of r rows, as
    o / c, which holds for members of any speed.

    A piece is trained in passes of as many rows as a member trains at a time. Where the host is
    busy for longer than the device, o is so large that small passes count as much as large ones.
    """

    usual_rows: int = 1
    """Rows of a pass at most, on a member that has not reported it."""
    overhead: Overhead = Overhead()
    overhead_rows: float = 0.0
    """Overhead of a pass, in rows; 0 while it is unknown."""
    rows: Mapping[str, int] = field(default_factory=dict)
    """Rows of a pass at most, by member."""
    means: Mapping[str, MeanFragment] = field(default_factory=dict)
    """Mean pass of each member."""

    @property
    def is_known(self) -> bool:
        return self.overhead.is_known

    def rows_of(self, member: str) -> int:
        return self.rows.get(member, self.usual_rows)

    def work(self, rows: float, pass_rows: int) -> float:
        """Return the number of rows without passes that take as long as a piece of this size.

        >>> PassCosts(overhead_rows=2.0).work(rows=10, pass_rows=8)
        14.0
        """
        return rows + math.ceil(rows / pass_rows) * self.overhead_rows

    def with_overhead(self, overhead: Overhead) -> "PassCosts":
        rows = overhead.samples(self.usual_rows)
        return replace(self, overhead=overhead, overhead_rows=rows or 0.0)

    def observe(self, member: str, rows: int, pass_rows: int, seconds: float) -> "PassCosts":
        """Learn from a piece what its passes took, each of as many of its rows."""
        costs = self
        if pass_rows and pass_rows != self.rows.get(member):
            costs = replace(costs, rows={**self.rows, member: pass_rows})
        passes = math.ceil(rows / costs.rows_of(member))
        each, mean = rows / passes, costs.means.get(member)
        if mean is None:
            mean = MeanFragment(each, seconds / passes)
        else:
            if each != mean.samples:
                overhead = costs.overhead.observe(mean, each, seconds / passes)
                costs = costs.with_overhead(overhead)
            mean = mean.observe(each, seconds / passes)
        return replace(costs, means={**costs.means, member: mean})

    def only_of(self, addresses: Collection[str]) -> "PassCosts":
        """Forget members that have left."""
        return replace(
            self,
            rows={a: each for a, each in self.rows.items() if a in addresses},
            means={a: each for a, each in self.means.items() if a in addresses},
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs(LineCosts):
    """Holds the learned costs of a run's work, in seconds."""

    shared_share: float = 0.0
    """Share of the denoising steps that a fragment computes once for all its samples. It is known
    from the recipe, and so is the next."""
    group_size: int = 1
    overhead: Overhead = Overhead()
    learned_share: float = 0.0
    """Value of the overhead's `fixed_share`; 0 while it is unknown."""
    fragments: Mapping[str, MeanFragment] = field(default_factory=dict)
    """Mean fragment of each device that generates."""
    rollout: Mapping[str, Estimate] = field(default_factory=dict)
    """Seconds per sample of a whole group, by worker."""
    gradient: Mapping[str, Estimate] = field(default_factory=dict)
    """Seconds per group, by member."""
    passes: PassCosts = PassCosts()
    switch: Estimate = field(default_factory=lambda: Estimate(value=0.0))
    """Seconds that a member takes to switch to generation and back."""
    ready: Estimate = field(default_factory=Estimate)
    """Seconds from a fragment's end to its rewards."""
    commit: Estimate = field(default_factory=Estimate)
    _medians: tuple[tuple[Mapping[str, Estimate], float | None], ...] = field(
        default=(), compare=False, repr=False
    )
    """Estimates of workers, and the median over them: it holds for no others."""

    def rollout_seconds(self, worker: str) -> float | None:
        """Seconds per sample; for a worker not measured yet, what the others take."""
        return self._seconds_of(worker, self.rollout)

    def gradient_seconds(self, worker: str) -> float | None:
        """Seconds per group; for a device not measured yet, what the others take."""
        return self._seconds_of(worker, self.gradient)

    def train_seconds(self, members: Collection[str]) -> float | None:
        """Seconds per group of members that train it together; None while that is not known."""
        seconds = [self.gradient_seconds(member) for member in members]
        rates = [1 / each for each in seconds if each]
        return 1 / sum(rates) if rates and len(rates) == len(seconds) else None

    def _seconds_of(self, worker: str, estimates: Mapping[str, Estimate]) -> float | None:
        return estimates[worker].value if worker in estimates else self._median(estimates)

    def _median(self, estimates: Mapping[str, Estimate]) -> float | None:
        """Return the median over some workers, computed once: when a batch opens, each worker
        without a measurement needs it."""
        for workers, value in self._medians:
            if workers is estimates:
                return value
        value = _median(estimates)
        object.__setattr__(self, "_medians", ((estimates, value), *self._medians[:1]))
        return value

    def whole_samples(self, samples: float) -> float:
        """Samples of a whole group that take as long as a fragment of this size: the same number,
        or more if fewer samples share fixed costs, such as shared steps or the overhead of calls.

        >>> Costs(shared_share=0.5, group_size=4).whole_samples(1)
        1.6
        """
        share, group = self.fixed_share, self.group_size
        if not share:
            return samples
        return group * (share + samples * (1 - share)) / (share + group * (1 - share))

    @property
    def fixed_share(self) -> float:
        """Share of the seconds of a fragment of one sample that a larger one takes no more of."""
        return max(self.shared_share, self.learned_share)

    def with_overhead(self, overhead: Overhead) -> "Costs":
        share = overhead.samples(self.group_size)
        return replace(self, overhead=overhead, learned_share=share / (1 + share) if share else 0.0)

    def as_measured(self) -> "Costs":
        """The costs that the last batch met: the newest observation of each."""
        return replace(
            self,
            rollout={worker: each.newest() for worker, each in self.rollout.items()},
            gradient={worker: each.newest() for worker, each in self.gradient.items()},
            switch=self.switch.newest(),
            ready=self.ready.newest(),
            commit=self.commit.newest(),
        )

    def observe_piece(
        self, member: str, seconds: float, *, rows: int, group_rows: int, pass_rows: int
    ) -> "Costs":
        """Learn from the seconds of a piece of this many of a group's rows."""
        passes = self.passes.observe(member, rows, pass_rows, seconds)
        limit = passes.rows_of(member)
        whole = seconds * passes.work(group_rows, limit) / passes.work(rows, limit)
        return replace(self.observe_gradient(member, whole), passes=passes)

    def observe_gradient(self, worker: str, seconds: float) -> "Costs":
        estimate = self.gradient.get(worker, Estimate())
        return replace(self, gradient={**self.gradient, worker: estimate.observe(seconds)})

    def observe_fragment(self, worker: str, samples: int, seconds: float) -> "Costs":
        """Learn from a fragment how much of its time does not depend on its size."""
        mean, costs = self.fragments.get(worker), self
        if mean is None:
            mean = MeanFragment(samples, seconds)
        else:
            if samples != mean.samples:
                costs = self.with_overhead(self.overhead.observe(mean, samples, seconds))
            mean = mean.observe(samples, seconds)
        return replace(costs, fragments={**self.fragments, worker: mean})

    def observe_rollout(self, worker: str, seconds: float) -> "Costs":
        estimate = self.rollout.get(worker, Estimate())
        return replace(self, rollout={**self.rollout, worker: estimate.observe(seconds)})

    def only_of(self, addresses: Collection[str]) -> "Costs":
        """Forget workers that have left, once they are more than those that there are."""
        if len(self.fragments) + len(self.gradient) <= 4 * len(addresses) + MAX_DEPARTED_WORKERS:
            return self
        kept: dict[str, Any] = {
            name: {a: each for a, each in getattr(self, name).items() if a in addresses}
            for name in ("fragments", "rollout", "gradient", "up", "down", "version")
        }
        return replace(self, passes=self.passes.only_of(addresses), **kept)

    def observe(self, cost: SharedCost, value: float) -> "Costs":
        observed: dict[str, Any] = {cost: getattr(self, cost).observe(value)}
        return replace(self, **observed)


def _median(estimates: Mapping[str, Estimate]) -> float | None:
    values = [each.value for each in estimates.values() if each.value is not None]
    return median(values) if values else None
