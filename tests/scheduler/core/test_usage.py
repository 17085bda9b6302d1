"""What each device is said to do, and for whom it is said to wait."""

import pytest

from services.scheduler.core.fluid.events import MemberReported
from services.scheduler.core.inputs import WorkerJoined
from services.scheduler.core.machine import step
from services.scheduler.core.state import State
from services.scheduler.core.usage import UsageMeter, uses
from shared.messages.contracts import GenerateFragment, TrainGroup
from shared.messages.fluid import TrainPiece
from shared.messages.workers import Holds
from tests import examples
from tests.scheduler.core.machine_driver import Machine, joined


def test_each_device_waits_for_whoever_is_late() -> None:
    machine = Machine("a", "b", num_groups=1)
    machine.handle(WorkerJoined("t-0", "t", "trainer", concurrency=0))
    first, second = machine.tasks(examples.published(0))

    def now() -> tuple[str, str, str]:
        seen = uses(machine.plan, machine.state)
        return seen["a"], seen["b"], seen["t"]

    assert now() == ("generating", "generating", "tail")
    machine.handle(examples.generated(first))
    assert now() == ("tail", "generating", "tail")
    machine.handle(examples.generated(second))
    assert now() == ("waiting_for_reward", "waiting_for_reward", "waiting_for_reward")
    machine.handle(examples.scored(first))
    [train] = machine.handle(examples.scored(second))
    assert isinstance(train, TrainGroup)
    assert now() == ("waiting_for_trainer",) * 3, "it has not said that it holds the version"
    [piece] = machine.handle(
        MemberReported("t-0", Holds(version=0, checksum="0" * 32, update=0, sum_bytes=0))
    )
    assert isinstance(piece, TrainPiece)
    assert now() == ("waiting_for_trainer", "waiting_for_trainer", "training")


def test_a_lent_device_generates() -> None:
    plan = examples.plan(num_groups=2)
    state, commands = State(), []
    for event in (WorkerJoined("t-0", "t", "trainer"), joined("a"), examples.published(0)):
        state, more = step(plan, state, event, 0.0)
        commands += more
    assert uses(plan, state)["t"] == "tail"  # nothing is known of its costs yet
    assert [c.worker for c in commands if isinstance(c, GenerateFragment)] == ["a-0", "a-0"]


def test_seconds_add_up_to_the_time_between_two_commits() -> None:
    meter = UsageMeter()
    meter.advance(10.0, {"a": "generating"})
    meter.advance(13.0, {"a": "generating", "b": "tail"})
    meter.advance(14.0, {"a": "tail", "b": "tail"})
    meter.move("a", 1.0, "generating", "waiting_for_weights")
    devices = meter.take()
    assert devices["a"] == {"generating": 2.0, "tail": 1.0, "waiting_for_weights": 1.0}
    assert sum(devices["a"].values()) == pytest.approx(4.0)
    assert meter.take() == {}
