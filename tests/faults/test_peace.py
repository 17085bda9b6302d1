"""The simulated cluster without faults: nothing fails, so nothing may be done twice."""

import pytest

from services.scheduler.core.state import LoanState, State
from services.scheduler.sim.cluster import Cluster, build
from services.scheduler.sim.history_events import Added, Begun, Computed, Stored
from shared.messages.contracts import FragmentGenerated, FragmentReleased
from tests.examples import with_schedule
from tests.faults.check import violations
from tests.faults.schedules import draw


def run(seed: int) -> Cluster:
    schedule = draw(seed)
    # One shorter than what work takes is a fault.
    plan = with_schedule(schedule.plan, slot_deadline_s="auto")
    cluster = build(
        plan, schedule.timing, rollout=schedule.rollout,
        trainer_slots=schedule.trainer_slots, seed=seed, leases=True, tick=1.0,
        first_state=State(recovering=True, tag=LoanState(controller=schedule.tag)),
        keep_intervals=True,
        lanes=schedule.lanes, can_train=schedule.can_train,
    )  # fmt: skip
    cluster.world.run(500.0, lambda: cluster.finished)
    return cluster


@pytest.mark.parametrize("seed", range(100))
def test_a_run_without_faults_finishes_and_keeps_every_invariant(seed: int) -> None:
    cluster = run(seed)
    assert cluster.finished
    assert violations(cluster.plan, cluster.history, cluster.commits.versions) == []
    facts = cluster.history.facts
    assert all(fact.accepted for fact in facts if isinstance(fact, Stored))
    stored = [fact.message for fact in facts if isinstance(fact, Stored)]
    begun = {fact.generation for fact in facts if isinstance(fact, Begun)}
    results = [m for m in stored if isinstance(m, FragmentGenerated)]
    released = [m for m in stored if isinstance(m, FragmentReleased)]
    assert len(results) <= len(begun) <= len(results) + len(released)
    computed = {fact.number for fact in facts if isinstance(fact, Computed)}
    groups = [group for commit in cluster.commits.versions for group in commit.trained]
    contributed = [group for group in groups if group.contribution is not None]
    assert len(computed) == len(contributed)


def test_the_trainer_helps_and_groups_are_begun_early_in_some_of_them() -> None:
    clusters = [run(seed) for seed in range(60)]
    groups = [g for c in clusters for commit in c.commits.versions for g in commit.trained]
    makers = {part.generated_by for group in groups for part in group.fragments}
    assert any(maker.startswith("trainer") for maker in makers)
    assert {group.batch - group.policy.version for group in groups} == {0, 1}
    assert {group.contribution is not None for group in groups} == {True, False}
    slices = [f.samples for c in clusters for f in c.history.facts if isinstance(f, Added)]
    assert {len(samples) for samples in slices} >= {0, 1, 2, 3, 4, 5}
