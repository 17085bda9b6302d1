"""What an event costs does not grow with the number of fluid devices: looks are counted."""

from collections import Counter
from collections.abc import Callable
from typing import Any, Literal

import pytest

from bench.growth import fluid_core
from services.scheduler.core.fluid import members, pieces


def looks_per_event(
    number: int, max_staleness: Literal[0, 1], monkeypatch: pytest.MonkeyPatch
) -> float:
    """Looks at single members, over a batch from its opening to its commit."""
    looks = Counter[str]()

    def counted(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*given: Any) -> Any:
            looks[name] += 1
            return function(*given)

        return call

    with monkeypatch.context() as patch:
        looked_at = ((members, "may_step"), (pieces, "_member"), (pieces, "_before_pieces"))
        for module, name in looked_at:
            patch.setattr(module, name, counted(name, getattr(module, name)))
        measured = fluid_core.measure(number, batches=2, max_staleness=max_staleness)
    return looks.total() / measured.events


@pytest.mark.parametrize("max_staleness", [0, 1])
def test_looks_at_members_per_event_are_few_however_many_there_are(
    max_staleness: Literal[0, 1], monkeypatch: pytest.MonkeyPatch
) -> None:
    few, many = (looks_per_event(number, max_staleness, monkeypatch) for number in (16, 128))
    assert many < 1.5 * few
