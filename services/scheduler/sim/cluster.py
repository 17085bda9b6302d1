"""A simulated cluster put together: broker, scheduler, workers and trainer in one virtual time."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from services.scheduler.core.inputs import WorkerJoined
from services.scheduler.core.state import Plan, State
from services.scheduler.costs.noise import Noise, rollout_device, trainer_device
from services.scheduler.sim.batches import Trainer
from services.scheduler.sim.broker import Broker, Delay
from services.scheduler.sim.commits import Commits
from services.scheduler.sim.devices import SimReward, SimRollout
from services.scheduler.sim.fabric import Fabric
from services.scheduler.sim.history import History
from services.scheduler.sim.independent_devices import IndependentTrainer, Lane
from services.scheduler.sim.members import SimMember
from services.scheduler.sim.scheduler import LookAhead, SimScheduler, Status
from services.scheduler.sim.timing import Timing
from services.scheduler.sim.trainer import SimTrainer
from services.scheduler.sim.world import Process, World
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
    trainer_slots: int
    """Devices of the trainer that can generate; 0: none."""
    lanes: Sequence[str] = ()
    """Kinds of a trainer's independent devices; empty: its devices go together."""
    rollout: dict[str, SimRollout] = field(default_factory=dict)
    """Name -> rollout device."""
    trainer: Trainer | None = None
    members: dict[str, SimMember] = field(default_factory=dict)
    """Name -> fluid device; there is no trainer then."""
    fabric: Fabric | None = None
    """What fluid devices are connected by."""
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
        """Start a fluid device, or start it again under a new address."""
        if self.fabric is None:
            self.fabric = Fabric(self.world, self.timing.exchange)
        member = SimMember(
            process=Process(self.world, name), broker=self.broker, history=self.history,
            timing=self.timing, kind=kind, address=self._address(name), plan=self.plan,
            commits=self.commits, fabric=self.fabric,
            one_step=self.plan.schedule.staleness_limit > 0,
        )  # fmt: skip
        self.members[name] = member
        joined = WorkerJoined(
            member.address, name, "trainer", kind=kind,
            concurrency=int(self.plan.schedule.members_generate),
        )  # fmt: skip
        scheduler = self.scheduler
        if scheduler.leases:
            member.report = lambda: self._tell(member, joined)
        else:
            member.report = lambda: self._tell_holds(member)
        self._announce(member, joined)
        member.start()
        return member

    def _tell_holds(self, member: SimMember) -> None:
        """Report as any message arrives: not before the batch that was published before."""
        holds, scheduler = member.holds, self.scheduler
        scheduler.process.after(self.broker.delay(), lambda: scheduler.holds(member.address, holds))

    def add_trainer(self) -> Trainer:
        """Start the trainer, or start it again from the newest commit."""
        trainer = self._new_trainer(Process(self.world, "trainer"), self._address("trainer"))
        self.trainer = trainer
        joined = WorkerJoined(
            trainer.address,
            "trainer",
            "trainer",
            concurrency=self.trainer_slots,
            independent_devices=bool(self.lanes),
        )
        if self.scheduler.leases and self.trainer_slots:
            trainer.report = lambda: self._tell(trainer, joined)
        self._announce(trainer, joined)
        trainer.start()
        return trainer

    def _new_trainer(self, process: Process, address: str) -> Trainer:
        if not self.lanes:
            return SimTrainer(
                process, self.broker, self.history, self.timing, address, self.plan, self.commits,
                slots=max(1, self.trainer_slots),
            )  # fmt: skip
        lanes = tuple(
            Lane(
                f"{address}/{place}",
                trainer_device(place),
                kind,
                math.isfinite(self.timing.fragment(kind, 1)),
            )
            for place, kind in enumerate(self.lanes)
        )
        return IndependentTrainer(
            process, self.broker, self.history, self.timing, address, self.plan, self.commits,
            lanes=lanes,
        )  # fmt: skip

    def _announce(self, worker: SimRollout | Trainer | SimMember, joined: WorkerJoined) -> None:
        """Tell the scheduler of a worker at once, or by statuses for as long as it lives."""
        if self.scheduler.leases:
            worker.process.after(0.0, lambda: self._report(worker, joined))
        else:
            self.scheduler.joined(joined)

    def _report(self, worker: SimRollout | Trainer | SimMember, joined: WorkerJoined) -> None:
        self._tell(worker, joined)
        worker.process.after(STATUS_S, lambda: self._report(worker, joined))

    def _tell(self, worker: SimRollout | Trainer | SimMember, joined: WorkerJoined) -> None:
        """Not stored: who does not hear it now will hear the next one."""
        loan = worker.loan if isinstance(worker, Trainer) and joined.concurrency else None
        idles = not isinstance(worker, Trainer) and worker.idles
        holds = worker.holds if isinstance(worker, SimMember) else None
        scheduler, status = self.scheduler, Status(joined, loan, idles, holds)
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
    trainer_slots: int,
    reward_workers: int = 1,
    seed: int = 0,
    delay: Delay = lambda: 0.0,
    first_state: State | None = None,
    look_ahead: LookAhead | None = None,
    tick: float | None = None,
    keep_intervals: bool = False,
    leases: bool = False,
    lanes: Sequence[str] = (),
    members: Mapping[str, int] | None = None,
) -> Cluster:
    """A cluster with everything started at time 0.

    ``rollout``: devices by kind. ``members``: fluid devices by kind, in place of a
    trainer. ``delay``: seconds of one message, drawn for each.
    ``lanes``: see `Cluster`. ``leases``: workers make themselves known by statuses,
    and are lost when they are silent.
    """
    world = World(seed)
    history = History(world, Noise(timing.noise, seed), keep_intervals)
    broker = Broker(world, delay)
    commits = Commits()
    scheduler = SimScheduler(
        Process(world, "scheduler"), broker, plan, commits,
        first_state or State(recovering=True), look_ahead, tick, leases,
    )  # fmt: skip
    scheduler.start()
    reward = SimReward(
        Process(world, "reward"), broker, history, timing, _rewards(plan.seed), reward_workers
    )
    reward.start()
    cluster = Cluster(
        plan=plan, timing=timing, world=world, broker=broker, history=history,
        scheduler=scheduler, commits=commits, reward=reward, trainer_slots=trainer_slots,
        lanes=lanes,
    )  # fmt: skip
    for kind, count in rollout.items():
        for number in range(count):
            cluster.add_rollout(rollout_device(kind, number), kind)
    for kind, count in (members or {}).items():
        for number in range(count):
            cluster.add_member(member_name(kind, number), kind)
    if not members:
        cluster.add_trainer()
    return cluster


def member_name(kind: str, number: int) -> str:
    """Return the name of a fluid device, by which its noise is drawn as well."""
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
