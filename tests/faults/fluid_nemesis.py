"""What goes wrong while fluid devices run, and when."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from random import Random

from services.scheduler.sim.cluster import Cluster
from services.scheduler.sim.members import SimMember
from services.scheduler.sim.world import Process
from shared.messages.contracts import OperatorRequest

POINTS = (
    "generates", "trains", "exchanges", "holds", "stepped", "stores", "commits", "committed",
)  # fmt: skip
"""Where a member may die: while it generates, in a backward pass, in the exchange, between sum and
step, after the step, before its weights are stored, before the record, and after it."""
FAILPOINTS = (
    "gave a piece", "ordered an exchange", "ordered a step", "named a committer", "sent a group",
    "issued",
)  # fmt: skip
OPERATOR_S = 3.0
ZOMBIE_S = 6.0
"""A scheduler that was replaced goes on for so long at most: then it finds the lease taken."""
MOST_MEMBERS = 5


@dataclass(slots=True)
class FluidNemesis:
    """Strikes at random moments, as long as there is no peace."""

    cluster: Cluster
    random: Random
    at_peace: bool = False
    met: Counter[str] = field(default_factory=Counter)
    _between: float = 1.0
    _weights: list[int] = field(default_factory=list)
    _zombies: list[Process] = field(default_factory=list)
    _num_joined: int = 0
    _num_requests: int = 0

    def start(self) -> None:
        self._between = self.random.uniform(0.3, 3.0)
        self._weights = [self.random.choice((0, 1, 1, 4)) for _ in FAULTS]
        if not any(self._weights):
            self._weights = [1] * len(FAULTS)
        failure = self.random.choice((0.0, 0.0, 0.05))
        for member in self.cluster.members.values():
            member.piece_failure = failure
        self._later(self.random.expovariate(1 / self._between), self._strike)
        self._later(OPERATOR_S, self._operate)

    def make_peace(self) -> None:
        """Everything that died is started, everything that hangs goes on, nothing fails."""
        self.at_peace = True
        cluster = self.cluster
        cluster.history.fault("peace")
        cluster.broker.repeat = cluster.reward.failure = cluster.status_loss = 0.0
        cluster.scheduler.commands_left = cluster.scheduler.failpoint = None
        for zombie in self._zombies:
            zombie.kill()
        for process in self._processes():
            process.heal()
        for name, member in list(cluster.members.items()):
            self._calm(member)
            self._restart_member(name)
        self._restart_scheduler()
        if not cluster.reward.process.alive:
            cluster.restart_reward()
        for name, worker in list(cluster.rollout.items()):
            if not worker.process.alive:
                cluster.add_rollout(name, worker.kind)

    def _calm(self, member: SimMember) -> None:
        member.on.clear()
        member.piece_failure, member.steps_wrongly = 0.0, False

    def _strike(self) -> None:
        if self.at_peace:
            return
        name, fault = self.random.choices(FAULTS, self._weights)[0]
        if fault(self):
            self._meet(name)
        self._later(self.random.expovariate(1 / self._between), self._strike)

    def _meet(self, name: str, target: str = "") -> None:
        self.met[name] += 1
        self.cluster.history.fault(name, target)

    def _operate(self) -> None:
        """Resume a run that has failed."""
        if self.cluster.scheduler.state.phase == "failed":
            self._meet("run resumed")
            self._num_requests += 1
            self.cluster.broker.publish(
                OperatorRequest(action="resume", id=f"sim-{self._num_requests}")
            )
        self._later(OPERATOR_S, self._operate)

    def _later(self, seconds: float, action: Callable[[], None]) -> None:
        self.cluster.world.at(self.cluster.world.now + seconds, action)

    def _duration(self) -> float:
        """Mostly short; one in three is longer than a lease."""
        random = self.random
        return random.uniform(5.5, 9.0) if random.random() < 0.33 else random.uniform(0.05, 3.0)

    def _processes(self) -> list[Process]:
        cluster = self.cluster
        members = [member.process for member in cluster.members.values()]
        rollout = [worker.process for worker in cluster.rollout.values()]
        return [*members, *rollout, cluster.reward.process, cluster.scheduler.process]

    def _member(self) -> SimMember | None:
        alive = [m for m in self.cluster.members.values() if m.process.alive and not m.hangs]
        return self.random.choice(alive) if alive else None

    # --- faults: each says whether there was anything to fail ---

    def kill_at(self, point: str) -> bool:
        member = self._member()
        if member is None:
            return False

        def die() -> None:
            if member.process.alive and not self.at_peace:
                self._meet(f"died: {point}", member.address)
                self._kill(member)

        member.on[point] = die
        return True

    def kill_all_at(self, point: str) -> bool:
        """All that live die when one of them comes to this point."""
        member = self._member()
        if member is None:
            return False

        def die() -> None:
            if not self.at_peace and member.process.alive:
                self._meet(f"all died: {point}")
                for each in list(self.cluster.members.values()):
                    if each.process.alive:
                        self._kill(each)

        member.on[point] = die
        return True

    def _kill(self, member: SimMember) -> None:
        member.process.kill()
        name = member.process.name
        self._later(self._duration(), lambda: self._restart_member(name))

    def hold_member(self, how: Callable[[Process, float], None]) -> bool:
        member = self._member()
        if member is not None:
            how(member.process, self._duration())
        return member is not None

    def hang_member(self) -> bool:
        """A member reports and finishes nothing any more, not even in peace."""
        member = self._member()
        if member is None or sum(not m.hangs for m in self.cluster.members.values()) < 2:
            return False
        member.hangs = True
        return True

    def drain_member(self) -> bool:
        member = self._member()
        if member is None:
            return False
        member.drain()
        self._later(self._duration(), partial(self._restart_member, member.process.name))
        return True

    def differ(self) -> bool:
        member = self._member()
        if member is not None:
            member.steps_wrongly = True
        return member is not None

    def succeed_member(self) -> bool:
        """A member hangs, another is started in its place, and then the first goes on."""
        member = self._member()
        if member is None:
            return False
        self._stop(member.process)

        def follow() -> None:
            if not self.at_peace and self.cluster.members[member.process.name] is member:
                self._zombies.append(member.process)
                self.cluster.add_member(member.process.name, member.kind)

        self._later(self.random.uniform(0.1, 3.0), follow)
        return True

    def _stop(self, process: Process) -> None:
        how = process.pause if self.random.random() < 0.5 else process.cut_off
        how(self.random.uniform(0.5, 7.0))

    def join(self) -> bool:
        if len(self.cluster.members) >= MOST_MEMBERS:
            return False
        self._num_joined += 1
        self.cluster.add_member(f"trainer-new-{self._num_joined}", "member")
        return True

    def kill_scheduler(self) -> bool:
        self.cluster.scheduler.process.kill()
        self._later(self._duration(), self._restart_scheduler)
        return True

    def kill_between_commands(self) -> bool:
        self.cluster.scheduler.commands_left = self.random.randrange(4)
        self._later(2.0 + self._duration(), self._restart_scheduler)
        return True

    def kill_after_a_command(self) -> bool:
        self.cluster.scheduler.failpoint = self.random.choice(FAILPOINTS)
        for seconds in range(1, 10):
            self._later(float(seconds), self._restart_scheduler)
        return True

    def replace_scheduler(self) -> bool:
        """Another scheduler takes over in the next epoch, and the first goes on for a while."""
        old = self.cluster.scheduler.process
        if not old.alive:
            return False
        if self.random.random() < 0.7:
            self._stop(old)
        self._later(ZOMBIE_S, old.kill)
        self._zombies.append(old)
        self.cluster.restart_scheduler()
        return True

    def hold_scheduler(self, how: Callable[[Process, float], None]) -> bool:
        how(self.cluster.scheduler.process, self._duration())
        return True

    def stop_broker(self) -> bool:
        seconds = self._duration()
        for process in self._processes():
            process.cut_off(seconds)
        return True

    def lose_statuses(self) -> bool:
        self.cluster.status_loss = 0.9

        def end() -> None:
            self.cluster.status_loss = 0.0

        self._later(self.random.uniform(1.0, 12.0), end)
        return True

    def kill_reward(self) -> bool:
        self.cluster.reward.process.kill()

        def restart() -> None:
            if not self.cluster.reward.process.alive:
                self.cluster.restart_reward()

        self._later(self._duration(), restart)
        return True

    def _restart_member(self, name: str) -> None:
        member = self.cluster.members[name]
        if not member.process.alive:
            self.cluster.add_member(name, member.kind)

    def _restart_scheduler(self) -> None:
        if not self.cluster.scheduler.process.alive:
            self.cluster.restart_scheduler()


Make = Callable[[FluidNemesis], bool]
FAULTS: tuple[tuple[str, Make], ...] = (
    *((f"kill: {point}", partial(FluidNemesis.kill_at, point=point)) for point in POINTS),
    *((f"kill all: {point}", partial(FluidNemesis.kill_all_at, point=point)) for point in POINTS),
    ("pause member", partial(FluidNemesis.hold_member, how=Process.pause)),
    ("cut off member", partial(FluidNemesis.hold_member, how=Process.cut_off)),
    ("hang member", FluidNemesis.hang_member),
    ("drain member", FluidNemesis.drain_member),
    ("differ", FluidNemesis.differ),
    ("succeed member", FluidNemesis.succeed_member),
    ("join", FluidNemesis.join),
    ("kill scheduler", FluidNemesis.kill_scheduler),
    ("kill between commands", FluidNemesis.kill_between_commands),
    ("kill after a command", FluidNemesis.kill_after_a_command),
    ("pause scheduler", partial(FluidNemesis.hold_scheduler, how=Process.pause)),
    ("cut off scheduler", partial(FluidNemesis.hold_scheduler, how=Process.cut_off)),
    ("stop broker", FluidNemesis.stop_broker),
    ("replace scheduler", FluidNemesis.replace_scheduler),
    ("lose statuses", FluidNemesis.lose_statuses),
    ("kill reward", FluidNemesis.kill_reward),
)
DEATHS = tuple(f"{kind}: {point}" for kind in ("died", "all died") for point in POINTS)
"""Deaths that have to come about in a sweep."""
