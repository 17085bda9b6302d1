"""Learns online what work costs: running median of three, then an exponential average."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from statistics import median, median_low

WINDOW = 3
"""Observations per median, so that a single outlier never passes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """Estimates a positive quantity. The first observation replaces a prior value.

    >>> Estimate().observe(2.0).observe(2.0).observe(10.0).value
    2.0
    """

    value: float | None = None
    spread: float = 0.0
    """Mean relative distance of observations from the value, single outliers aside."""
    count: int = 0
    """Number of observations."""
    recent: tuple[float, ...] = ()
    alpha: float = 0.4
    """Weight of the newest median; at 0.4, a step is followed within about four observations."""

    def observe(self, x: float) -> "Estimate":
        recent = (*self.recent, x)[-WINDOW:]
        level = median_low(recent)
        if self.value is None or not self.count:
            value, spread = level, self.spread
        else:
            weight = max(self.alpha, 1 / (self.count + 1))
            value = self.value + weight * (level - self.value)
            away = median_low([abs(old - self.value) for old in recent]) / max(self.value, 1e-9)
            spread = self.spread + self.alpha * (away - self.spread)
        return Estimate(
            value=value, spread=spread, count=self.count + 1, recent=recent, alpha=self.alpha
        )

    def newest(self) -> "Estimate":
        """The same estimate with the last observation, or the prior, for its value."""
        return replace(self, value=self.recent[-1]) if self.recent else self


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """Holds the learned costs of a run's work, in seconds."""

    rollout: Mapping[str, Estimate] = field(default_factory=dict)
    """Seconds per sample, by worker."""
    help: Estimate = Estimate()
    """Seconds per sample on the trainer's device."""
    train: Estimate = Estimate()
    """Seconds per group at the trainer."""
    gradient: Mapping[str, Estimate] = field(default_factory=dict)
    """Seconds per group, by rollout device."""
    switch: Estimate = Estimate(value=0.0)
    """Seconds that the trainer's device takes to switch to generation and back."""
    ready: Estimate = Estimate()
    """Seconds from a fragment's end to its rewards."""
    commit: Estimate = Estimate()

    def rollout_seconds(self, worker: str) -> float | None:
        """Seconds per sample; for a worker not measured yet, what the others take."""
        known = self.rollout.get(worker)
        return known.value if known is not None else self._median_rollout()

    def help_seconds(self) -> float | None:
        """Seconds per sample of the trainer's device; before it has helped, of a rollout device."""
        return self._median_rollout() if self.help.value is None else self.help.value

    def as_measured(self) -> "Costs":
        """The costs that the last batch met: the newest observation of each."""
        return Costs(
            rollout={worker: each.newest() for worker, each in self.rollout.items()},
            help=self.help.newest(),
            train=self.train.newest(),
            gradient={worker: each.newest() for worker, each in self.gradient.items()},
            switch=self.switch.newest(),
            ready=self.ready.newest(),
            commit=self.commit.newest(),
        )

    def gradient_seconds(self, worker: str) -> float | None:
        """Seconds per group; for a device not measured yet, what the others take."""
        known = self.gradient.get(worker)
        if known is not None:
            return known.value
        others = [each.value for each in self.gradient.values() if each.value is not None]
        return median(others) if others else None

    def observe_gradient(self, worker: str, seconds: float) -> "Costs":
        known = self.gradient.get(worker, Estimate())
        return replace(self, gradient={**self.gradient, worker: known.observe(seconds)})

    def _median_rollout(self) -> float | None:
        known = [each.value for each in self.rollout.values() if each.value is not None]
        return median(known) if known else None

    def train_seconds(self) -> float:
        return self.train.value or 0.0

    def switch_seconds(self) -> float:
        return self.switch.value or 0.0

    def ready_seconds(self) -> float:
        return self.ready.value or 0.0

    def commit_seconds(self) -> float:
        return self.commit.value or 0.0

    def observe_rollout(self, worker: str, seconds: float) -> "Costs":
        known = self.rollout.get(worker, Estimate())
        return replace(self, rollout={**self.rollout, worker: known.observe(seconds)})

    def observe_help(self, seconds: float) -> "Costs":
        return replace(self, help=self.help.observe(seconds))

    def observe_train(self, seconds: float) -> "Costs":
        return replace(self, train=self.train.observe(seconds))

    def observe_switch(self, seconds: float) -> "Costs":
        return replace(self, switch=self.switch.observe(seconds))

    def observe_ready(self, seconds: float) -> "Costs":
        return replace(self, ready=self.ready.observe(seconds))

    def observe_commit(self, seconds: float) -> "Costs":
        return replace(self, commit=self.commit.observe(seconds))
