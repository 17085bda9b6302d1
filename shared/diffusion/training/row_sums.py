"""Sums over trained rows, kept on the device until the host reads them.

Reading a number from a device waits until all queued work is done. A pass therefore only queues
additions, in float64. The host reads all sums at once: at the end of a batch, or when a gradient
leaves the device.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from shared.diffusion.training.loss import Surrogate
from shared.diffusion.training.tally import Tally

ROW_SUMS = (
    "ratio_sum", "approx_kl_sum", "weight_sum", "weight_square_sum", "num_clipped_low",
    "num_clipped_high", "num_zero_advantage",
)  # fmt: skip
"""Fields of `Tally` that are sums over rows."""

MIN_RATIO = 1e-300
"""Lower limit of ratios inside the logarithm: a ratio may underflow to 0."""


@dataclass(slots=True)
class RowSums:
    """Accumulates the sums and extremes of a `Tally`; `move_to` empties it."""

    _sums: dict[str, Tensor] = field(default_factory=dict)
    """Field of `Tally` -> its sum, (); ``rows`` -> the sums in `ROW_SUMS`, (7,)."""
    _peaks: dict[str, Tensor] = field(default_factory=dict)
    """Field of `Tally` for the ratio error -> maxima of ratio, -ratio and abs(ratio - 1), (3,)."""

    def add(self, name: str, value: Tensor) -> None:
        """Adds a value to the sum ``name``; all values of a sum have one shape."""
        value = value.detach().double()
        total = self._sums.get(name)
        self._sums[name] = value if total is None else total + value

    def record(
        self, surrogate: Surrogate, advantage: Tensor, *, clip_range: float, staleness: int
    ) -> None:
        """Adds rows with the same staleness; ``advantage`` is (B,)."""
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
        largest = self._peaks.get(name)
        # fmax ignores NaN, which shows in the loss and in the norm of the gradient.
        self._peaks[name] = peaks if largest is None else torch.fmax(largest, peaks)

    def move_to(self, tally: Tally) -> None:
        """Adds everything to ``tally``; waits once for the device."""
        tensors = [*self._sums.values(), *self._peaks.values()]
        if not tensors:
            return
        numbers = iter(torch.cat([tensor.reshape(-1) for tensor in tensors]).tolist())
        for name in self._sums:
            for each in ROW_SUMS if name == "rows" else (name,):
                kind = type(getattr(tally, each))
                setattr(tally, each, getattr(tally, each) + kind(next(numbers)))
        for name in self._peaks:
            largest, negative, error = next(numbers), next(numbers), next(numbers)
            tally.ratio_max = max(tally.ratio_max, largest)
            tally.ratio_min = min(tally.ratio_min, -negative)
            setattr(tally, name, max(getattr(tally, name), error))
        self._sums, self._peaks = {}, {}
