"""Devices of the simulated cluster, in runs so small that every second can be told."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest

from services.scheduler.core.state import LoanState, Plan, State
from services.scheduler.core.tag.controller import Controller
from services.scheduler.sim.cluster import Cluster, build
from services.scheduler.sim.history_events import Interval
from services.scheduler.sim.timing import Timing
from shared.learning.prompts import PromptOrder
from shared.learning.windows import Windows
from shared.messages.contracts import Prompt
from shared.recipe.schedule import RunSchedule
from tests.examples import with_schedule

PLAN = Plan(
    prompts=PromptOrder((Prompt(text="a digit"), Prompt(text="another")), seed=0),
    num_batches=1, num_groups=2, group_size=4,
    windows=Windows(first=0, last=0), seed=0, loan_seconds=1e9,
    schedule=RunSchedule(fragment_size=4),
)  # fmt: skip
SPEED = {"fast": 1.0, "slow": 0.4, "slowest": 0.05}
TIMING = Timing(
    fragment=lambda kind, samples: 2.0 * samples / SPEED[kind],
    gradient=lambda kind, samples: 1.0 * samples / SPEED[kind],
    help=lambda samples: 2.0 * samples,
    score=lambda _: 0.0,
    train=lambda samples: 1.0 * samples,
    commit=3.0,
    publish=5.0,
    adopt=0.0,
    steps=4,
)


def run(
    plan: Plan,
    *,
    rollout: Mapping[str, int],
    lanes: Sequence[str],
    groups: int = 0,
) -> Cluster:
    """``groups``: that the trainer may generate."""
    state = State(
        recovering=True, tag=LoanState(controller=Controller(mode="fixed", groups=groups))
    )
    cluster = build(
        plan, TIMING, rollout=rollout, trainer_slots=len(lanes) or 1, lanes=lanes,
        keep_intervals=True,
        first_state=state,
    )  # fmt: skip
    assert cluster.world.run(1e6, lambda: cluster.finished)
    return cluster


def uses(cluster: Cluster, device: str) -> list[tuple[str, float, float]]:
    intervals: list[Interval] = [i for i in cluster.history.intervals if i.device == device]
    return [(i.use, round(i.begin, 3), round(i.end, 3)) for i in intervals]


def test_a_device_of_a_fluid_trainer_finishes_its_fragment_and_then_trains() -> None:
    """One group of each device: both are done after 8 s, and train 8 samples together."""
    cluster = run(PLAN, rollout={}, lanes=["fast", "fast"], groups=2)
    trainer = cluster.trainer
    assert trainer is not None
    for lane in (0, 1):
        found = uses(cluster, f"{trainer.address}/{lane}")
        pieces = [("train", begin, begin + 1) for begin in (8.0, 9.0, 10.0, 11.0)]
        assert found == [("generate", 0.0, 8.0), *pieces, ("commit", 12.0, 20.0)]


def test_a_fast_device_takes_more_of_a_group() -> None:
    """The batch's last groups are cut into samples: 1 s on the fast one, 2.5 s on the slow one."""
    cluster = run(PLAN, rollout={"fast": 2}, lanes=["fast", "slow"])
    trainer = cluster.trainer
    assert trainer is not None
    train = {
        lane: [(begin, end) for use, begin, end in uses(cluster, f"{trainer.address}/{lane}")
               if use == "train"]
        for lane in (0, 1)
    }  # fmt: skip
    assert train == {
        0: [(begin, begin + 1) for begin in (8.0, 9.0, 10.0, 11.0, 12.0)],
        1: [(8.0, 10.5), (10.5, 13.0), (13.0, 15.5)],
    }  # fmt: skip


def test_a_device_trains_while_another_generates() -> None:
    """The second group is the trainer's: one device has it, the other trains the first."""
    cluster = run(PLAN, rollout={"fast": 1}, lanes=["slow", "fast"], groups=1)
    trainer = cluster.trainer
    assert trainer is not None
    slow, fast = (uses(cluster, f"{trainer.address}/{lane}") for lane in (0, 1))
    assert slow[0] == ("generate", 0.0, 20.0)
    assert fast[:2] == [("train", 8.0, 9.0), ("train", 9.0, 10.0)]


@pytest.mark.parametrize(("staleness", "seconds"), [(0, 8.0 + 4.0 + 3.0 + 5.0), (1, 8.0)])
def test_publication_overlaps_with_the_next_batch_if_that_may_be_stale(
    staleness: int, seconds: float
) -> None:
    """Generation takes 8 s, training 4, the optimizer 3 and publication 5: one after the other, or
    all beside generation."""
    plan = replace(with_schedule(PLAN, max_staleness=staleness), num_batches=6)
    times = run(plan, rollout={"fast": 2}, lanes=["fast"] * 2).history.commit_times
    assert times[-1] - times[-2] == pytest.approx(seconds, abs=0.1)
