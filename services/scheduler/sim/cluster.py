"""A simulated cluster put together: broker, scheduler, workers and members in one virtual time."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from services.scheduler.core.inputs import WorkerJoined
from services.scheduler.core.state import Plan, State
from services.scheduler.costs.noise import Noise, rollout_device
from services.scheduler.sim.broker import Broker, Delay
from services.scheduler.sim.commits import Commits
from services.scheduler.sim.devices import SimReward, SimRollout
from services.scheduler.sim.fabric import Fabric
from services.scheduler.sim.history import History
from services.scheduler.sim.members import SimMember
from services.scheduler.sim.scheduler import SimScheduler, Status
from services.scheduler.sim.timing import Timing
from services.scheduler.sim.world import Process, World
from shared.devices.loan import Loan
from shared.learning.seeds import derive
from shared.messages.contracts import FragmentGenerated

STATUS_S = 1.0


@dataclass(slots=True)
class Cluster:
    plan: Plan
    timing: Timing
    world: World
    broker: Broker
    history: History
    scheduler: SimScheduler
    commits: Commits
    reward: SimReward
    rollout: dict[str, SimRollout] = field(default_factory=dict)
    """Name -> rollout device."""
    members: dict[str, SimMember] = field(default_factory=dict)
    """Name -> device that trains."""
    fabric: Fabric | None = None
    """What members are connected by."""
    _lives: int = 0

    def add_rollout(self, name: str, kind: str) -> SimRollout:
        """Start a rollout worker, or start it again under a new address."""
        worker = SimRollout(
            Process(self.world, name), self.broker, self.history, self.timing, kind,
            self._address(name), self.plan.schedule.staleness_limit,
        )  # fmt: skip
        self.rollout[name] = worker
        worker.start()
        self._announce(worker, WorkerJoined(worker.address, name, "rollout", kind=kind))
        return worker

    def add_member(self, name: str, kind: str) -> SimMember:
        """Start a member, or start it again under a new address."""
        if self.fabric is None:
            self.fabric = Fabric(self.world, self.timing.exchange)
        schedule = self.plan.schedule
        generates = schedule.trainer_generates and math.isfinite(self.timing.help(kind, 1))
        member = SimMember(
            process=Process(self.world, name), broker=self.broker, history=self.history,
            timing=self.timing, kind=kind, address=self._address(name), plan=self.plan,
            commits=self.commits, fabric=self.fabric,
            generates=generates, one_step=schedule.staleness_limit > 0,
            loan=Loan() if generates and not schedule.members_generate else None,
        )  # fmt: skip
        self.members[name] = member
        joined = WorkerJoined(
            member.address, name, "trainer", kind=kind,
            concurrency=int(generates), ranks=self.timing.ranks,
        )  # fmt: skip
        scheduler = self.scheduler
        if scheduler.leases:
            member.report = lambda: self._tell(member, joined)
        else:
            member.report = lambda: self._tell_at_once(member)
        self._announce(member, joined)
        member.start()
        return member

    def _tell_at_once(self, member: SimMember) -> None:
        """Report as any message arrives: not before the batch that was published before."""
        holds, loan, scheduler = member.holds, member.loan, self.scheduler
        scheduler.process.after(
            self.broker.delay(), lambda: scheduler.member_reported(member.address, holds, loan)
        )

    def _announce(self, worker: SimRollout | SimMember, joined: WorkerJoined) -> None:
        """Tell the scheduler of a worker at once, or by statuses for as long as it lives."""
        if self.scheduler.leases:
            worker.process.after(0.0, lambda: self._report(worker, joined))
        else:
            self.scheduler.joined(joined)

    def _report(self, worker: SimRollout | SimMember, joined: WorkerJoined) -> None:
        self._tell(worker, joined)
        worker.process.after(STATUS_S, lambda: self._report(worker, joined))

    def _tell(self, worker: SimRollout | SimMember, joined: WorkerJoined) -> None:
        """Not stored: who does not hear it now will hear the next one."""
        holds = worker.holds if isinstance(worker, SimMember) else None
        loan = worker.loan if isinstance(worker, SimMember) else None
        scheduler, status = self.scheduler, Status(joined, loan, worker.idles, holds)
        scheduler.process.after(self.broker.delay(), lambda: scheduler.reported(status))

    def _address(self, name: str) -> str:
        self._lives += 1
        return f"{name}-{self._lives}"

    @property
    def finished(self) -> bool:
        return self.scheduler.state.phase == "finished"


def build(
    plan: Plan,
    timing: Timing,
    *,
    rollout: Mapping[str, int],
    members: Mapping[str, int],
    reward_workers: int = 1,
    seed: int = 0,
    delay: Delay = lambda: 0.0,
    first_state: State | None = None,
    tick: float | None = None,
    keep_intervals: bool = False,
    leases: bool = False,
) -> Cluster:
    """A cluster with everything started at time 0.

    Args:
        rollout: devices by kind that only generate.
        members: devices by kind that train.
        delay: seconds of one message, drawn for each.
        leases: workers make themselves known by statuses, and are lost when they are silent.
    """
    world = World(seed)
    history = History(world, Noise(timing.noise, seed), keep_intervals)
    broker = Broker(world, delay)
    commits = Commits()
    scheduler = SimScheduler(
        Process(world, "scheduler"), broker, plan, commits,
        first_state or State(recovering=True), tick, leases,
    )  # fmt: skip
    scheduler.start()
    reward = SimReward(
        Process(world, "reward"), broker, history, timing, _rewards(plan.seed), reward_workers
    )
    reward.start()
    cluster = Cluster(
        plan=plan, timing=timing, world=world, broker=broker, history=history,
        scheduler=scheduler, commits=commits, reward=reward,
    )  # fmt: skip
    for kind, count in rollout.items():
        for number in range(count):
            cluster.add_rollout(rollout_device(kind, number), kind)
    for kind, count in members.items():
        for number in range(count):
            cluster.add_member(member_name(kind, number), kind)
    return cluster


def member_name(kind: str, number: int) -> str:
    """Return the name of a member, by which its noise is drawn as well."""
    return f"trainer-{kind}-{number}"


class _rewards:
    """A reward per sample that anybody would compute again."""

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def __call__(self, event: FragmentGenerated) -> tuple[float, ...]:
        fragment = event.fragment
        return tuple(
            derive(self._seed, "reward", fragment.batch, fragment.group, sample) % 1000 / 1000
            for sample in fragment.samples
        )
