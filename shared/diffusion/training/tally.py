"""What happened to the rows of a batch: the metrics of its optimizer step."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from math import inf

from torch import Tensor

from shared.diffusion.training.loss import Surrogate
from shared.errors import ContractError

EXTREMES = {
    "ratio_min": min, "ratio_max": max, "onpolicy_ratio_error": max, "stale_ratio_error": max,
}  # fmt: skip
"""How two tallies become one, where they do not add up."""

LEAST_RATIO = 1e-300
"""A ratio that has underflowed still has a logarithm."""


@dataclass(slots=True)
class Tally:
    num_rows: int = 0
    loss: float = 0.0
    kl: float = 0.0
    ratio_sum: float = 0.0
    ratio_min: float = inf
    ratio_max: float = -inf
    approx_kl_sum: float = 0.0
    onpolicy_ratio_error: float = 0.0
    stale_ratio_error: float = 0.0
    num_stale: int = 0
    weight_sum: float = 0.0
    num_clipped_low: int = 0
    num_clipped_high: int = 0
    num_zero_advantage: int = 0
    num_skipped: int = 0
    """Of the rows, those that no network has seen, because their gradient is zero."""

    def note(
        self, surrogate: Surrogate, advantage: Tensor, *, clip_range: float, staleness: int
    ) -> None:
        """Add rows (B,) of one staleness."""
        ratio, clipped = surrogate.ratio, surrogate.clipped_ratio
        error = float((ratio - 1).abs().max())
        if staleness == 0:
            self.onpolicy_ratio_error = max(self.onpolicy_ratio_error, error)
        else:
            self.stale_ratio_error = max(self.stale_ratio_error, error)
            self.num_stale += len(ratio)
        self.num_rows += len(ratio)
        wide = ratio.double()
        self.ratio_sum += float(wide.sum())
        self.approx_kl_sum += float((wide - 1 - wide.clamp(min=LEAST_RATIO).log()).sum())
        self.ratio_min = min(self.ratio_min, float(ratio.min()))
        self.ratio_max = max(self.ratio_max, float(ratio.max()))
        self.weight_sum += float(surrogate.weight.double().sum())
        self.num_clipped_low += int(((clipped < 1 - clip_range) & (advantage < 0)).sum())
        self.num_clipped_high += int(((clipped > 1 + clip_range) & (advantage > 0)).sum())
        self.num_zero_advantage += int((advantage == 0).sum())

    def skip(self, num_rows: int) -> None:
        """Add rows without advantage that were not trained."""
        self.num_rows += num_rows
        self.num_zero_advantage += num_rows
        self.num_skipped += num_rows

    def plain(self) -> dict[str, float]:
        """For a message; finite if there is at least one row that was seen."""
        return {field.name: float(getattr(self, field.name)) for field in fields(self)}

    def merge(self, other: Mapping[str, float]) -> None:
        """Add the rows of a tally that `plain` has given.

        Raises:
            ContractError: if it is none, and this one is as it was.
        """
        names = {field.name for field in fields(self)}
        if other.keys() != names:
            raise ContractError(f"not a tally: {sorted(names ^ other.keys())[0]}")
        for name in names:
            mine = getattr(self, name)
            value = type(mine)(other[name])
            setattr(self, name, EXTREMES[name](mine, value) if name in EXTREMES else mine + value)

    def metrics(self) -> dict[str, float]:
        """What ratios and weights are is said of the rows that were seen."""
        rows = max(1, self.num_rows)
        seen = self.num_rows - self.num_skipped
        each = max(1, seen)
        return {
            "loss": self.loss,
            "kl": self.kl / each,
            "ratio_mean": self.ratio_sum / each if seen else 1.0,
            "ratio_min": self.ratio_min if seen else 1.0,
            "ratio_max": self.ratio_max if seen else 1.0,
            "approx_kl": self.approx_kl_sum / each,
            "onpolicy_ratio_error": self.onpolicy_ratio_error,
            "stale_ratio_error": self.stale_ratio_error,
            "stale_fraction": self.num_stale / each,
            "weight_mean": self.weight_sum / each if seen else 1.0,
            "clip_fraction_low": self.num_clipped_low / rows,
            "clip_fraction_high": self.num_clipped_high / rows,
            "zero_advantage_fraction": self.num_zero_advantage / rows,
        }
