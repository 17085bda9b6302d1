"""Residuals of rounding: the difference of this process's sum and its rounded sum, which the next
sum includes.

A residual counts once the step of its round is ordered, and not if the batch is trained again.
An incomplete round and a step without a commit leave the earlier residual. A process that ends
loses its residual: at most half a scale of each number, once.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from shared.messages.fluid import ExchangeSums, TakeStep

Update = tuple[int, int, int]
"""Batch, attempt and update."""


@dataclass(slots=True)
class Residuals:
    _after: dict[Update, Any] = field(default_factory=dict)
    """The residual after each update whose step was ordered."""
    _open: tuple[Update, int, Any] | None = None
    """Update, round and residual of the newest sum."""

    def add(self, message: ExchangeSums, sum_: Any, rounding: Callable[[Any], Any]) -> Any:
        """Return a sum with the residual, rounded; None is zero. A rounding that returns its
        argument leaves no residual."""
        before = self._before(message)
        if before is not None:
            sum_ = before if sum_ is None else sum_ + before
        sent = None if sum_ is None else rounding(sum_)
        self._open = _update(message), message.round, None if sent is sum_ else sum_ - sent
        return sent

    def count(self, step: TakeStep) -> None:
        """Record that the step of a round is ordered."""
        if self._open is not None and self._open[:2] == (_update(step), step.round):
            self._after[_update(step)] = self._open[2]

    def _before(self, message: ExchangeSums) -> Any:
        """Return the residual of the newest step of an earlier batch, or of this attempt at this
        batch; delete all others."""
        this = _update(message)
        valid = [each for each in self._after if each[0] < this[0] or each[:2] == this[:2]]
        newest = max((each for each in valid if each < this), default=None)
        self._after = {each: self._after[each] for each in valid if each == newest}
        return None if newest is None else self._after[newest]


def _update(message: ExchangeSums | TakeStep) -> Update:
    return message.batch, message.attempt, message.update
