"""Learns online what work costs: running median of three, then an exponential average."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from statistics import median, median_low
from typing import Any, Literal

Shared = Literal["help", "train", "switch", "ready", "commit"]
"""Work whose cost is one for all devices that do it."""

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

    @property
    def seconds(self) -> float:
        """The value; 0 while it is unknown."""
        return self.value or 0.0

    def newest(self) -> "Estimate":
        """The same estimate with the last observation, or the prior, for its value."""
        return replace(self, value=self.recent[-1]) if self.recent else self


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """Holds the learned costs of a run's work, in seconds."""

    shared_share: float = 0.0
    """Share of the denoising steps that a fragment computes once for all its samples. It is known
    from the recipe, and so is the next."""
    group_size: int = 1
    rollout: Mapping[str, Estimate] = field(default_factory=dict)
    """Seconds per sample of a whole group, by worker."""
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
        return _seconds_of(worker, self.rollout)

    def gradient_seconds(self, worker: str) -> float | None:
        """Seconds per group; for a device not measured yet, what the others take."""
        return _seconds_of(worker, self.gradient)

    def help_seconds(self) -> float | None:
        """Seconds per sample of the trainer's device; before it has helped, of a rollout device."""
        return _median(self.rollout) if self.help.value is None else self.help.value

    def whole_samples(self, samples: float) -> float:
        """How many samples of a whole group take as long as a fragment of so many: as many, or more
        if fewer share the steps that it computes once.

        >>> Costs(shared_share=0.5, group_size=4).whole_samples(1)
        1.6
        """
        share, group = self.shared_share, self.group_size
        if not share:
            return samples
        return group * (share + samples * (1 - share)) / (share + group * (1 - share))

    def as_measured(self) -> "Costs":
        """The costs that the last batch met: the newest observation of each."""
        return replace(
            self,
            rollout={worker: each.newest() for worker, each in self.rollout.items()},
            help=self.help.newest(),
            train=self.train.newest(),
            gradient={worker: each.newest() for worker, each in self.gradient.items()},
            switch=self.switch.newest(),
            ready=self.ready.newest(),
            commit=self.commit.newest(),
        )

    def observe_gradient(self, worker: str, seconds: float) -> "Costs":
        known = self.gradient.get(worker, Estimate())
        return replace(self, gradient={**self.gradient, worker: known.observe(seconds)})

    def observe_rollout(self, worker: str, seconds: float) -> "Costs":
        known = self.rollout.get(worker, Estimate())
        return replace(self, rollout={**self.rollout, worker: known.observe(seconds)})

    def observe(self, work: Shared, seconds: float) -> "Costs":
        observed: dict[str, Any] = {work: getattr(self, work).observe(seconds)}
        return replace(self, **observed)


def _seconds_of(worker: str, known: Mapping[str, Estimate]) -> float | None:
    return known[worker].value if worker in known else _median(known)


def _median(known: Mapping[str, Estimate]) -> float | None:
    values = [each.value for each in known.values() if each.value is not None]
    return median(values) if values else None
