"""Devices of the simulated cluster, in runs so small that every second can be told."""

from collections.abc import Mapping
from dataclasses import replace

import pytest

from services.scheduler.core.state import Plan, State, TagState
from services.scheduler.core.tag.controller import Controller
from services.scheduler.sim.cluster import Cluster, build
from services.scheduler.sim.history import History, SimUse
from services.scheduler.sim.timing import Timing
from shared.learning.prompts import PromptOrder
from shared.learning.windows import Windows
from shared.messages.contracts import Prompt, SetDevice
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
    help=lambda kind, samples: 2.0 * samples / SPEED[kind],
    gradient=lambda kind, samples: 1.0 * samples / SPEED[kind],
    score=lambda _: 0.0,
    step=3.0,
    publish=5.0,
    adopt=0.0,
    steps=4,
)


INTERVALS: dict[int, list[tuple[str, str, float, float]]] = {}
"""Uses of devices with their begin and end, by the number of the history."""


@pytest.fixture(autouse=True)
def recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    INTERVALS.clear()
    use = History.use

    def record(self: History, device: str, what: SimUse, delay: float, seconds: float) -> None:
        use(self, device, what, delay, seconds)
        begin = self.world.now + delay
        interval = device, what, round(begin, 3), round(begin + seconds, 3)
        INTERVALS.setdefault(id(self), []).extend([interval] if seconds else [])

    monkeypatch.setattr(History, "use", record)


def run(
    plan: Plan, *, rollout: Mapping[str, int], members: Mapping[str, int], groups: int = 0
) -> Cluster:
    """``groups``: that members may generate."""
    state = State(recovering=True, tag=TagState(controller=Controller(mode="fixed", groups=groups)))
    cluster = build(plan, TIMING, rollout=rollout, members=members, first_state=state)
    assert cluster.world.run(1e6, lambda: cluster.finished)
    return cluster


def uses(cluster: Cluster, name: str) -> list[tuple[str, float, float]]:
    device = f"{cluster.members[name].address}/0"
    return [
        (use, begin, end)
        for each, use, begin, end in INTERVALS[id(cluster.history)]
        if each == device
    ]


def test_members_that_are_lent_generate_their_share_and_then_train() -> None:
    """One group of each device: all are done after 8 s, and two train 12 samples together."""
    plan = replace(PLAN, num_groups=3, trained_steps=3)
    cluster = run(plan, rollout={"fast": 1}, members={"fast": 2}, groups=2)
    for number in (0, 1):
        found = uses(cluster, f"trainer-fast-{number}")
        assert found[0] == ("generate", 0.0, 8.0)
        assert {use for use, *_ in found[1:-1]} == {"train"}
        assert found[-1] == ("commit", 14.0, 17.0)


def test_a_fast_member_trains_more_of_a_batch() -> None:
    """8 samples on 1.4 devices: nobody waits for long at the end."""
    plan = replace(PLAN, trained_steps=3)
    cluster = run(plan, rollout={"fast": 2}, members={"fast": 1, "slow": 1})
    fast, slow = (
        sum(end - begin for use, begin, end in uses(cluster, f"trainer-{kind}-0") if use == "train")
        for kind in ("fast", "slow")
    )
    assert fast + 0.4 * slow == pytest.approx(8)
    assert 5 <= fast <= 6


def test_a_lone_member_is_called_back_after_a_step_and_keeps_its_fragment() -> None:
    """A group takes rollout 8 s; the member generates for 20 s, in steps of 5 s, and trains for 10.
    It comes back at 10 s, and goes on when nothing is ready."""
    plan = replace(PLAN, num_groups=3)
    cluster = run(plan, rollout={"fast": 1}, members={"slow": 1}, groups=1)
    found = uses(cluster, "trainer-slow-0")
    assert found[:2] == [("generate", 0.0, 10.0), ("train", 10.0, 20.0)]
    assert [use for use, *_ in found[-2:]] == ["train", "commit"]
    generated = sum(end - begin for use, begin, end in found if use == "generate")
    told = [m for m in cluster.broker.stored["DG_DEVICE"] if isinstance(m, SetDevice)]
    assert [m.mode for m in told[:2]] == ["generate", "train"]
    assert [m.loan_number for m in told] == list(range(1, len(told) + 1))
    assert generated in (10.0, 20.0)  # others take what it keeps if they are sooner


@pytest.mark.parametrize(("staleness", "seconds"), [(0, 8 + 4 + 3 + 5), (1, 3 + 4 + 3 + 5)])
def test_one_step_ahead_a_batch_is_generated_by_the_time_that_the_one_before_is_stored(
    staleness: int, seconds: float
) -> None:
    """Generation takes 8 s, training 4, the optimizer 3 and publication 5, one after the other. One
    step ahead, generation takes no time of its own, and the optimizer's is taken off what a member
    does next."""
    plan = replace(with_schedule(PLAN, max_staleness=staleness), num_batches=6)
    times = run(plan, rollout={"fast": 2}, members={"fast": 2}).history.commit_times
    assert times[-1] - times[-2] == pytest.approx(seconds, abs=0.1)
