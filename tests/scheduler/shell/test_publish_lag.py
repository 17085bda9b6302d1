"""How long it takes from an optimizer step to the first fragment generated with its result."""

import pytest

from services.scheduler.shell.metrics import PublishLag
from shared.messages.contracts import FragmentGenerated
from shared.telemetry import PUBLISH_LAG
from tests import examples


def fragment(version: int, weights: int | None = None, seconds: float = 2.0) -> FragmentGenerated:
    task = examples.task(batch=version)
    event = examples.generated(
        task.model_copy(update={"policy": examples.policy(version, weights)})
    )
    return event.model_copy(update={"seconds": seconds})


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    found = list[float]()
    monkeypatch.setattr(PUBLISH_LAG, "observe", found.append)
    return found


def test_it_ends_with_the_begin_of_the_first_fragment(seen: list[float]) -> None:
    lag = PublishLag()
    lag.publish(examples.policy(1), 10.0)
    lag.observe(fragment(0), examples.policy(1), 11.0)
    lag.observe(fragment(1), examples.policy(1), 14.0)
    lag.observe(fragment(1), examples.policy(1), 17.0)
    assert seen == [2.0]


def test_a_fragment_may_be_generated_before_the_commit(seen: list[float]) -> None:
    lag = PublishLag()
    for at in (13.0, 15.0):
        lag.observe(fragment(1), examples.policy(0), at)
    lag.publish(examples.policy(1), 10.0)
    lag.observe(fragment(1), examples.policy(1), 19.0)
    assert seen == [1.0]


def test_one_of_a_version_that_was_lost_does_not_count(seen: list[float]) -> None:
    lag = PublishLag()
    lag.observe(fragment(1, weights=9), examples.policy(0), 13.0)
    lag.publish(examples.policy(1), 20.0)
    assert seen == []
    lag.observe(fragment(1), examples.policy(1), 25.0)
    assert seen == [3.0]
