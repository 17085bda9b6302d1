"""A simulated cluster put together: broker, scheduler, workers and members in one virtual time."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from services.scheduler.core.inputs import WorkerJoined
from services.scheduler.core.state import Plan, State
from services.scheduler.costs.noise import Noise, rollout_device
from services.scheduler.sim.broker import Broker
from services.scheduler.sim.commits import Commit
from services.scheduler.sim.devices import SimReward, SimRollout
from services.scheduler.sim.fabric import Fabric
from services.scheduler.sim.history import History
from services.scheduler.sim.members import SimMember
from services.scheduler.sim.scheduler import SimScheduler
from services.scheduler.sim.sites import SimSite, Site
from services.scheduler.sim.timing import Timing
from services.scheduler.sim.world import World
from shared.devices.loan import Loan
from shared.learning.seeds import derive
from shared.messages.contracts import FragmentGenerated


@dataclass(slots=True)
class Cluster:
    plan: Plan
    timing: Timing
    world: World
    broker: Broker
    history: History
    scheduler: SimScheduler
    fabric: Fabric
    """Connections of the members."""
    commits: list[Commit] = field(default_factory=list)
    """Commits of the run, by their versions."""
    rollout: dict[str, SimRollout] = field(default_factory=dict)
    """Name -> rollout device."""
    members: dict[str, SimMember] = field(default_factory=dict)
    """Name -> device that trains."""
    sites: dict[str, SimSite] = field(default_factory=dict)
    """Name -> site that is far from home."""

    @property
    def devices(self) -> "list[SimRollout | SimMember]":
        return [*self.rollout.values(), *self.members.values()]

    def add_site(self, site: Site) -> None:
        """Start the devices of a site."""
        far = self.sites[site.name] = SimSite(
            site, self.world, self.scheduler.handle, lambda: self.scheduler.state.levels.down
        )
        others = self.members.values() if site.trains else self.rollout.values()
        first = sum(each.kind == site.kind for each in others)
        for number in range(first, first + site.count):
            if site.trains:
                self.add_member(member_name(site.kind, number), site.kind, far)
            else:
                self.add_rollout(rollout_device(site.kind, number), site.kind, far)

    def add_rollout(self, name: str, kind: str, site: SimSite | None = None) -> None:
        """Start a rollout worker; ``site``: None of the home site."""
        worker = self.rollout[name] = SimRollout(
            world=self.world, broker=self.broker, history=self.history, timing=self.timing,
            name=name, kind=kind, address=self._address(name), site=site,
        )  # fmt: skip
        worker.start()
        self.scheduler.handle(WorkerJoined(worker.address, name, "rollout", kind=kind))

    def add_member(self, name: str, kind: str, site: SimSite | None = None) -> None:
        """Start a member."""
        schedule = self.plan.schedule
        generates = schedule.trainer_generates and math.isfinite(self.timing.help(kind, 1))
        member = self.members[name] = SimMember(
            world=self.world, broker=self.broker, history=self.history, timing=self.timing,
            name=name, kind=kind, address=self._address(name), plan=self.plan,
            commits=self.commits, fabric=self.fabric, site=site,
            generates=generates, one_step=schedule.staleness_limit > 0,
            loan=Loan() if generates and not schedule.members_generate else None,
        )  # fmt: skip
        member.report = lambda: self._report(member)
        self.scheduler.handle(WorkerJoined(
            member.address, name, "trainer", kind=kind,
            concurrency=int(generates), ranks=self.timing.ranks,
        ))  # fmt: skip
        member.start()

    def _report(self, member: SimMember) -> None:
        """Report as any message arrives: not before the batch that was published before."""
        holds, loan, scheduler = member.holds, member.loan, self.scheduler
        self.world.after(
            self.broker.delay, lambda: scheduler.member_reported(member.address, holds, loan)
        )

    def _address(self, name: str) -> str:
        return f"{name}-{len(self.rollout) + len(self.members) + 1}"

    @property
    def finished(self) -> bool:
        return self.scheduler.state.phase == "finished"


def build(
    plan: Plan,
    timing: Timing,
    *,
    rollout: Mapping[str, int],
    members: Mapping[str, int],
    sites: Sequence[Site] = (),
    seed: int = 0,
    delay: float = 0.0,
    first_state: State | None = None,
) -> Cluster:
    """A cluster with everything started at time 0.

    Args:
        rollout: devices by kind that only generate.
        members: devices by kind that train.
        sites: devices that are far from both.
        delay: seconds of a message.
    """
    world = World()
    history = History(world, Noise(timing.noise, seed))
    broker = Broker(world, delay)
    scheduler = SimScheduler(world, broker, plan, first_state or State(recovering=True))
    scheduler.start()
    SimReward(world, broker, history, timing, _rewards(plan.seed)).start()
    fabric = Fabric(world, timing.exchange, timing.sum_bytes)
    cluster = Cluster(plan, timing, world, broker, history, scheduler, fabric)
    for kind, count in rollout.items():
        for number in range(count):
            cluster.add_rollout(rollout_device(kind, number), kind)
    for kind, count in members.items():
        for number in range(count):
            cluster.add_member(member_name(kind, number), kind)
    for site in sites:
        cluster.add_site(site)
    return cluster


def member_name(kind: str, number: int) -> str:
    """Return the name of a member, by which its noise is drawn as well."""
    return f"trainer-{kind}-{number}"


class _rewards:
    """A reward per sample that any process can recompute."""

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def __call__(self, event: FragmentGenerated) -> tuple[float, ...]:
        fragment = event.fragment
        return tuple(
            derive(self._seed, "reward", fragment.batch, fragment.group, sample) % 1000 / 1000
            for sample in fragment.samples
        )
