"""Of 64 devices 32 report and never finish: the batch ends, and no sample is trained twice."""

import math
from dataclasses import replace

import pytest

from services.scheduler.core.inputs import Tick
from services.scheduler.core.state import Plan
from services.scheduler.sim.cluster import Cluster, build
from services.scheduler.sim.timing import Timing
from tests.examples import with_schedule
from tests.scheduler.sim.test_devices import PLAN, TIMING

DEADLINE_S = 50.0
NUM_DEVICES = 64


def run(plan: Plan, *, hanging: int) -> Cluster:
    timing: Timing = replace(
        TIMING,
        fragment=lambda kind, samples: 2.0 * samples,
        gradient=lambda kind, samples: 0.01 * samples,
    )
    cluster = build(plan, timing, rollout={"gpu": NUM_DEVICES}, members={"fast": 1})
    for worker in list(cluster.rollout.values())[:hanging]:
        worker.timing = replace(timing, fragment=lambda kind, samples: math.inf)

    def tick() -> None:
        cluster.scheduler.handle(Tick())
        cluster.world.after(1.0, tick)

    tick()
    assert cluster.world.run(1e4, lambda: cluster.finished)
    return cluster


@pytest.mark.parametrize("num_groups", [32, pytest.param(96, marks=pytest.mark.slow)])
def test_a_batch_ends_although_half_of_the_devices_hang(num_groups: int) -> None:
    """Within twice its normal time and the deadline; the record names devices that work."""
    plan = replace(
        with_schedule(PLAN, slot_deadline_s=DEADLINE_S), num_groups=num_groups, group_size=8
    )
    normal = run(plan, hanging=0).world.now
    cluster = run(plan, hanging=32)
    assert cluster.world.now <= 2 * normal + DEADLINE_S
    hang = {worker.address for worker in list(cluster.rollout.values())[:32]}
    [record] = cluster.commits[1:]
    parts = [part for group in record.trained for part in group.fragments]
    assert hang.isdisjoint(part.generated_by for part in parts)
    samples = [(p.fragment.group, sample) for p in parts for sample in p.fragment.samples]
    assert len(samples) == len(set(samples)) == num_groups * 8
