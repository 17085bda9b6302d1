"""What the scheduler knows stays as small as it was, however long a run is."""

import pickle
from collections.abc import Callable
from dataclasses import replace

import pytest

from services.scheduler import limits
from services.scheduler.core.inputs import WorkerJoined, WorkerLeft
from services.scheduler.core.state import State
from services.scheduler.core.tag.estimates import MAX_DEPARTED_WORKERS, Costs
from services.scheduler.sim.cluster import Cluster, build
from services.scheduler.sim.timing import Timing
from shared.messages.contracts import Prompt
from tests import examples
from tests.scheduler.core.machine_driver import Machine

PROMPTS = tuple(Prompt(text=str(number)) for number in range(7))
FEW, MANY = 100, 1000
SAME = 1.05
"""Sizes that differ by less are equal: larger numbers take more bytes."""


def size(state: State) -> int:
    """Bytes of all that the state refers to."""
    return len(pickle.dumps(state))


def roles() -> Cluster:
    plan = examples.plan(num_batches=MANY + 2, num_groups=1, group_size=2, max_staleness=1)
    return build(plan, timing(), rollout={"a": 1}, members={"a": 1})


def fluid() -> Cluster:
    plan = examples.plan(num_batches=MANY + 2, num_groups=1, group_size=2, mode="fluid", tag=0)
    return build(plan, timing(), rollout={}, members={"a": 1})


def timing() -> Timing:
    return Timing(
        fragment=lambda kind, samples: 0.5 * samples, gradient=lambda kind, samples: 0.1 * samples,
        help=lambda kind, samples: 0.5 * samples, score=lambda samples: 0.1,
        step=0.1, publish=0.1, adopt=0.1, steps=2,
    )  # fmt: skip


@pytest.mark.parametrize("cluster", [roles, pytest.param(fluid, marks=pytest.mark.slow)])
def test_a_simulated_scheduler_knows_no_more_after_1000_steps_than_after_100(
    cluster: Callable[[], Cluster],
) -> None:
    run, sizes = cluster(), list[int]()
    assert FEW > limits.MAX_KEPT_DECISIONS
    for steps in (FEW, MANY):
        assert run.world.run(1e9, lambda: len(run.commits) > steps)  # noqa: B023
        sizes.append(size(run.scheduler.state))
    assert sizes[1] < SAME * sizes[0]


def test_workers_that_have_left_are_forgotten() -> None:
    """Every step has a device that is started again, under another address."""
    machine, sizes = Machine(num_batches=MANY), list[int]()
    for version in range(MANY // 3):
        machine.handle(WorkerJoined(f"b-{version}", "b", "rollout"))
        machine.finish(machine.tasks(examples.published(version)))
        machine.handle(WorkerLeft(f"b-{version}"))
        if version in (FEW, MANY // 3 - 1):
            assert len(machine.state.costs.rollout) <= MAX_DEPARTED_WORKERS + 8
            sizes.append(size(replace(machine.state, costs=Costs())))
        machine.told.clear()
    assert sizes[1] < SAME * sizes[0]
