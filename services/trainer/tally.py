"""What happened to the rows of a batch: the metrics of its optimizer step."""

from dataclasses import dataclass

from torch import Tensor

from services.trainer.loss import Surrogate


@dataclass(slots=True)
class Tally:
    num_rows: int = 0
    loss: float = 0.0
    kl: float = 0.0
    ratio_sum: float = 0.0
    ratio_min: float = float("inf")
    ratio_max: float = float("-inf")
    onpolicy_ratio_error: float = 0.0
    stale_ratio_error: float = 0.0
    num_stale: int = 0
    weight_sum: float = 0.0
    num_clipped_low: int = 0
    num_clipped_high: int = 0
    num_zero_advantage: int = 0

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
        self.ratio_sum += float(ratio.double().sum())
        self.ratio_min = min(self.ratio_min, float(ratio.min()))
        self.ratio_max = max(self.ratio_max, float(ratio.max()))
        self.weight_sum += float(surrogate.weight.double().sum())
        self.num_clipped_low += int(((clipped < 1 - clip_range) & (advantage < 0)).sum())
        self.num_clipped_high += int(((clipped > 1 + clip_range) & (advantage > 0)).sum())
        self.num_zero_advantage += int((advantage == 0).sum())

    def metrics(self) -> dict[str, float]:
        rows = max(1, self.num_rows)
        return {
            "loss": self.loss,
            "kl": self.kl / rows,
            "ratio_mean": self.ratio_sum / rows,
            "ratio_min": self.ratio_min,
            "ratio_max": self.ratio_max,
            "onpolicy_ratio_error": self.onpolicy_ratio_error,
            "stale_ratio_error": self.stale_ratio_error,
            "stale_fraction": self.num_stale / rows,
            "weight_mean": self.weight_sum / rows,
            "clip_fraction_low": self.num_clipped_low / rows,
            "clip_fraction_high": self.num_clipped_high / rows,
            "zero_advantage_fraction": self.num_zero_advantage / rows,
        }
