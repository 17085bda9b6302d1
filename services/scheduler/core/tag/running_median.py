"""Estimates a quantity online by a running median of three, then an exponential average."""

from dataclasses import dataclass, replace
from statistics import median_low

MEDIAN_WINDOW = 3
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
        recent = (*self.recent, x)[-MEDIAN_WINDOW:]
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
