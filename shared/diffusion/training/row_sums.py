"""Sums over trained rows on the device, until the host reads them.

To read a number of a device is to wait until everything is done that is queued there. So a pass
only queues additions, in float64, and all numbers are read at once: at the end of a batch, or where
a gradient leaves the device.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from shared.diffusion.training.loss import Surrogate
from shared.diffusion.training.tally import Tally

SUMS = (
    "ratio_sum", "approx_kl_sum", "weight_sum", "weight_square_sum", "num_clipped_low",
    "num_clipped_high", "num_zero_advantage",
)  # fmt: skip
"""Fields of a tally that rows add to."""

MIN_RATIO = 1e-300
"""A ratio that has underflowed still has a logarithm."""


@dataclass(slots=True)
class RowSums:
    """Adds up what a tally will have of the rows; empty once it is read."""

    _parts: dict[str, Tensor] = field(default_factory=dict)
    """Sums of losses by the field's name, (); ``rows``: the sums in `SUMS`, (7,)."""
    _peaks: dict[str, Tensor] = field(default_factory=dict)
    """Largest ratio, largest of the negative ratios, and largest distance of one from 1: (3,), by
    the name of the field for the last."""

    def add(self, name: str, value: Tensor) -> None:
        """Adds a number () or several to a sum."""
        value = value.detach().double()
        held = self._parts.get(name)
        self._parts[name] = value if held is None else held + value

    def record(
        self, surrogate: Surrogate, advantage: Tensor, *, clip_range: float, staleness: int
    ) -> None:
        """Adds rows of one staleness; ``advantage`` is (B,)."""
        ratio, clipped = surrogate.ratio.double(), surrogate.clipped_ratio
        weight = surrogate.weight.double()
        rows = (
            ratio,
            ratio - 1 - ratio.clamp(min=MIN_RATIO).log(),
            weight,
            weight**2,
            ((clipped < 1 - clip_range) & (advantage < 0)).double(),
            ((clipped > 1 + clip_range) & (advantage > 0)).double(),
            (advantage == 0).double(),
        )
        self.add("rows", torch.stack(rows).sum(1))
        error = (surrogate.ratio - 1).abs().double()
        peaks = torch.stack((ratio, -ratio, error)).amax(1)
        name = "onpolicy_ratio_error" if staleness == 0 else "stale_ratio_error"
        held = self._peaks.get(name)
        # What is no number is no ratio: it shows in the loss, and in the norm of the gradient.
        self._peaks[name] = peaks if held is None else torch.fmax(held, peaks)

    def into(self, tally: Tally) -> None:
        """Moves everything into ``tally``: waits once for the device."""
        held = [*self._parts.items(), *self._peaks.items()]
        if not held:
            return
        numbers = iter(torch.cat([tensor.reshape(-1) for _, tensor in held]).tolist())
        for name in self._parts:
            for each in SUMS if name == "rows" else (name,):
                kind = type(getattr(tally, each))
                setattr(tally, each, getattr(tally, each) + kind(next(numbers)))
        for name in self._peaks:
            largest, negative, error = next(numbers), next(numbers), next(numbers)
            tally.ratio_max = max(tally.ratio_max, largest)
            tally.ratio_min = min(tally.ratio_min, -negative)
            setattr(tally, name, max(getattr(tally, name), error))
        self._parts, self._peaks = {}, {}
