"""What both studies have in common: the order of runs, and figures of a run's measured batches."""

import pytest

from bench.runner.figures import Interval, RunRecord, Window
from bench.runner.rounds import by_turns
from bench.runner.watch import Sample
from shared.run.usage import BatchUsage

INTERVALS = [
    Interval("rollout-0", "generate", 0.0, 4.0, 8.0),
    Interval("rollout-1", "generate", 3.0, 5.0, 4.0),
    Interval("trainer-0", "train", 4.0, 6.0, 4.0),
]
USAGE = [
    BatchUsage(batch=batch, seconds=4.0, devices={"rollout-0": {"generating": 3.0, "tail": 1.0}})
    for batch in range(3)
]
RUN = RunRecord(
    commits=[0.0, 2.0, 4.0, 7.0],
    begin=Sample(1, 2.0, {"scheduler": 1.0}),
    end=Sample(3, 7.0, {"scheduler": 2.0}),
    usage=USAGE,
    intervals=INTERVALS,
)
WINDOW = Window(RUN, 1, 3)


async def test_modes_are_measured_there_and_back_and_kept_in_their_order() -> None:
    order: list[tuple[str, int]] = []

    async def measure(mode: str, number: int) -> int:
        order.append((mode, number))
        return len(order)

    found = await by_turns(["a", "b"], 3, measure)
    assert order == [("a", 0), ("b", 0), ("b", 1), ("a", 1), ("a", 2), ("b", 2)]
    assert found == [("a", [1, 4, 5]), ("b", [2, 3, 6])]


def test_a_window_counts_what_is_under_way_at_its_ends_in_proportion() -> None:
    assert WINDOW.batch_seconds == [2.0, 3.0] and WINDOW.num_batches == 2
    assert WINDOW.samples("rollout", "generate") == pytest.approx(4.0 + 4.0)
    assert WINDOW.samples("trainer", "train") == pytest.approx(4.0)
    assert WINDOW.shares("rollout", 2) == pytest.approx({"generate": (2.0 + 2.0) / 5 / 2})
    assert WINDOW.shares("reward") == {}


def test_waits_are_those_of_the_measured_batches_and_cores_those_between_samples() -> None:
    assert WINDOW.waits("rollout") == {"tail": 0.25}
    assert WINDOW.waits("trainer") == {}
    assert RUN.cores == {"scheduler": pytest.approx(0.2)}
