"""Makes faults at random times in a simulated cluster, and in the end makes peace."""

from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random

from services.scheduler.sim.broker import RUN
from services.scheduler.sim.cluster import Cluster
from services.scheduler.sim.devices import SimRollout
from services.scheduler.sim.schedules import Schedule
from services.scheduler.sim.world import Process
from shared.contracts import OperatorRequest, TagRequest

OPERATOR_S = 3.0
"""An operator looks at the run this often, and resumes it if it has failed."""
MOST_DEVICES = 5
FAILPOINTS = ("issued", "sent a group", "lent", "called back", "took back", "took back")
RESUMED = {"failed": "failure", "paused": "pause", "stopped": "stop"}


@dataclass(slots=True)
class Nemesis:
    cluster: Cluster
    schedule: Schedule
    at_peace: bool = False
    zombies: list[Process] = field(default_factory=list)
    """Processes whose successors were started while they lived."""
    _random: Random = field(init=False)
    _weights: list[int] = field(init=False)
    """Of the kinds of faults: every schedule has its favourites, and kinds that it lacks."""
    _num_requests: int = 0
    _num_joined: int = 0

    def __post_init__(self) -> None:
        self._random = Random(self.schedule.seed + 1_000_003)
        self._weights = [self._random.choice((0, 1, 1, 2, 8)) for _ in FAULTS]

    def start(self) -> None:
        for worker in self.cluster.rollout.values():
            self._mislead(worker)
        self._later(self._between(), self._strike)
        self._later(OPERATOR_S, self._operate)

    def make_peace(self) -> None:
        """Everything that died is started, everything that hangs goes on, nothing fails."""
        self.at_peace = True
        cluster = self.cluster
        cluster.history.fault("peace")
        for zombie in self.zombies:
            zombie.kill()
        cluster.broker.repeat = cluster.broker.poison = cluster.reward.failure = 0.0
        cluster.status_loss = 0.0
        for worker in [*cluster.rollout.values(), cluster.trainer, cluster.reward]:
            assert worker is not None
            worker.process.heal()
        cluster.scheduler.process.heal()
        for worker in cluster.rollout.values():
            worker.loads_wrongly = False
        for restart in (self._restart_scheduler, self._restart_reward, self._restart_trainer):
            restart()
        for name in cluster.rollout:
            self._restart_rollout(name)

    def _strike(self) -> None:
        """One fault, now and then two at once."""
        if self.at_peace:
            return
        for _ in range(2 if self._random.random() < 0.1 else 1):
            name, fault = self._random.choices(FAULTS, self._weights)[0]
            target = fault(self)
            if target is not None:
                self.cluster.history.fault(name, target)
        self._later(self._between(), self._strike)

    def _between(self) -> float:
        return self._random.expovariate(1 / self.schedule.between_faults)

    def _duration(self) -> float:
        """Mostly short; one in three lasts longer than the lease of a worker."""
        random = self._random
        return random.uniform(5.5, 9.0) if random.random() < 0.33 else random.uniform(0.05, 3.0)

    def _later(self, seconds: float, action: Callable[[], None]) -> None:
        self.cluster.world.at(self.cluster.world.now + seconds, action)

    def _operate(self) -> None:
        """Resume what has failed; what was paused only in the end."""
        phase = self.cluster.scheduler.state.phase
        if phase == "failed" or (self.at_peace and phase in RESUMED):
            self.cluster.history.fault(f"run resumed after {RESUMED[phase]}")
            self._request("resume")
        self._later(OPERATOR_S, self._operate)

    def _request(self, action: str) -> None:
        self._num_requests += 1
        request = OperatorRequest(action=action, id=f"{RUN}-{self._num_requests}")  # type: ignore[arg-type]
        self.cluster.broker.publish(request)

    # --- faults: each gives its target, or None if there is nothing to fail now ---

    def kill_rollout(self) -> str | None:
        worker = self._any_rollout()
        if worker is None:
            return None
        worker.process.kill()
        self._later(self._duration(), lambda: self._restart_rollout(worker.process.name))
        return worker.address

    def drain_rollout(self) -> str | None:
        worker = self._any_rollout()
        if worker is None or worker.process.paused_until > self.cluster.world.now:
            return None
        worker.drain()
        self._later(self._duration(), lambda: self._restart_rollout(worker.process.name))
        return worker.address

    def join(self) -> str | None:
        if len(self.cluster.rollout) >= MOST_DEVICES:
            return None
        self._num_joined += 1
        worker = self.cluster.add_rollout(f"new-{self._num_joined}", "new")
        self._mislead(worker)
        return worker.address

    def succeed_rollout(self) -> str | None:
        """A worker hangs, another is started in its place, and then the first goes on."""
        worker = self._any_rollout()
        if worker is None:
            return None
        self._hang(worker.process)
        self.zombies.append(worker.process)
        name, kind = worker.process.name, worker.kind
        self._later(self._random.uniform(0.1, 3.0), lambda: self._start_rollout(name, kind))
        self._later(12.0, worker.process.kill)
        return worker.address

    def pause_rollout(self) -> str | None:
        worker = self._any_rollout()
        return None if worker is None else self._pause(worker.process, worker.address)

    def cut_off_rollout(self) -> str | None:
        worker = self._any_rollout()
        return None if worker is None else self._cut_off(worker.process, worker.address)

    def kill_reward(self) -> str | None:
        if not self.cluster.reward.process.alive:
            return None
        self.cluster.reward.process.kill()
        self._later(self._duration(), self._restart_reward)
        return "reward"

    def pause_reward(self) -> str | None:
        return self._pause(self.cluster.reward.process, "reward")

    def cut_off_reward(self) -> str | None:
        return self._cut_off(self.cluster.reward.process, "reward")

    def kill_trainer(self) -> str | None:
        trainer = self.cluster.trainer
        assert trainer is not None
        if not trainer.process.alive:
            return None
        trainer.process.kill()
        self._later(self._duration(), self._restart_trainer)
        return trainer.address

    def succeed_trainer(self) -> str | None:
        """A zombie trainer goes on beside its successor, and commits if it can."""
        trainer = self.cluster.trainer
        assert trainer is not None
        if not trainer.process.alive:
            return None
        self._hang(trainer.process)
        self.zombies.append(trainer.process)
        self._later(self._random.uniform(0.1, 2.0), self._start_trainer)
        self._later(12.0, trainer.process.kill)
        return trainer.address

    def pause_trainer(self) -> str | None:
        trainer = self.cluster.trainer
        assert trainer is not None
        return self._pause(trainer.process, trainer.address)

    def cut_off_trainer(self) -> str | None:
        trainer = self.cluster.trainer
        assert trainer is not None
        return self._cut_off(trainer.process, trainer.address)

    def kill_scheduler(self) -> str | None:
        if not self.cluster.scheduler.process.alive:
            return None
        self.cluster.scheduler.process.kill()
        self._later(self._duration(), self._restart_scheduler)
        return "scheduler"

    def kill_between_commands(self) -> str | None:
        """The scheduler dies when it has sent some of an event's commands."""
        scheduler = self.cluster.scheduler
        if not scheduler.process.alive:
            return None
        scheduler.commands_left = self._random.randrange(4)
        self._later(3.0 + self._duration(), self._restart_scheduler)
        return "scheduler"

    def kill_after_a_command(self) -> str | None:
        """The scheduler dies just after it has sent a command of some kind."""
        scheduler = self.cluster.scheduler
        if not scheduler.process.alive:
            return None
        scheduler.failpoint = self._random.choice(FAILPOINTS)
        deadline = self.cluster.world.now + 10.0

        def watch() -> None:
            if scheduler.process.alive and self.cluster.world.now < deadline:
                self._later(1.0, watch)
            else:
                self._restart_scheduler()

        self._later(1.0, watch)
        return scheduler.failpoint

    def pause_scheduler(self) -> str | None:
        return self._pause(self.cluster.scheduler.process, "scheduler")

    def cut_off_scheduler(self) -> str | None:
        return self._cut_off(self.cluster.scheduler.process, "scheduler")

    def stop_broker(self) -> str | None:
        """Nobody reaches it for a while; it forgets nothing."""
        cluster, seconds = self.cluster, self._duration()
        assert cluster.trainer is not None
        workers = [*cluster.rollout.values(), cluster.trainer, cluster.reward, cluster.scheduler]
        for worker in workers:
            worker.process.cut_off(seconds)
        return f"{seconds:.1f} s"

    def lose_statuses(self) -> str | None:
        self.cluster.status_loss = 0.9

        def end() -> None:
            self.cluster.status_loss = 0.0

        self._later(self._random.uniform(1.0, 15.0), end)
        return ""

    def pause_run(self) -> str | None:
        self._request("pause" if self._random.random() < 0.7 else "stop")
        self._later(self._duration(), lambda: self._request("resume"))
        return ""

    def request_tag(self) -> str | None:
        self._num_requests += 1
        mode = self._random.choice(("auto", "off", "fixed", "fixed"))
        groups = self._random.randint(1, self.schedule.plan.num_groups)
        request = TagRequest(mode=mode, groups=groups, id=f"{RUN}-{self._num_requests}")  # type: ignore[arg-type]
        self.cluster.broker.publish(request)
        return mode

    # --- what they are made of ---

    def _any_rollout(self) -> SimRollout | None:
        alive = [w for w in self.cluster.rollout.values() if w.process.alive]
        return self._random.choice(alive) if alive else None

    def _pause(self, process: Process, target: str) -> str | None:
        if not process.alive:
            return None
        seconds = self._duration()
        process.pause(seconds)
        return f"{target} {seconds:.1f} s"

    def _cut_off(self, process: Process, target: str) -> str | None:
        if not process.alive:
            return None
        seconds = self._duration()
        process.cut_off(seconds)
        return f"{target} {seconds:.1f} s"

    def _hang(self, process: Process) -> None:
        if self._random.random() < 0.5:
            process.pause(self._random.uniform(0.5, 7.0))
        else:
            process.cut_off(self._random.uniform(0.5, 7.0))

    def _mislead(self, worker: SimRollout) -> None:
        worker.loads_wrongly = (
            not self.at_peace and self._random.random() < self.schedule.wrong_weights
        )

    def _start_rollout(self, name: str, kind: str) -> None:
        if not self.at_peace:
            self._mislead(self.cluster.add_rollout(name, kind))

    def _restart_rollout(self, name: str) -> None:
        worker = self.cluster.rollout[name]
        if not worker.process.alive:
            self._mislead(self.cluster.add_rollout(name, worker.kind))

    def _restart_reward(self) -> None:
        if not self.cluster.reward.process.alive:
            self.cluster.restart_reward()

    def _start_trainer(self) -> None:
        if not self.at_peace:
            self.cluster.add_trainer()

    def _restart_trainer(self) -> None:
        assert self.cluster.trainer is not None
        if not self.cluster.trainer.process.alive:
            self.cluster.add_trainer()

    def _restart_scheduler(self) -> None:
        scheduler = self.cluster.scheduler
        scheduler.commands_left = scheduler.failpoint = None
        if not scheduler.process.alive:
            self.cluster.history.fault("scheduler restarts")
            self.cluster.restart_scheduler()


FAULTS: tuple[tuple[str, Callable[[Nemesis], str | None]], ...] = tuple(
    (fault.__name__, fault)
    for fault in (
        Nemesis.kill_rollout, Nemesis.drain_rollout, Nemesis.join, Nemesis.succeed_rollout,
        Nemesis.pause_rollout, Nemesis.cut_off_rollout, Nemesis.kill_reward, Nemesis.pause_reward,
        Nemesis.cut_off_reward, Nemesis.kill_trainer, Nemesis.succeed_trainer,
        Nemesis.pause_trainer, Nemesis.cut_off_trainer, Nemesis.kill_scheduler,
        Nemesis.kill_between_commands, Nemesis.kill_after_a_command, Nemesis.pause_scheduler, Nemesis.cut_off_scheduler,
        Nemesis.stop_broker, Nemesis.lose_statuses, Nemesis.pause_run, Nemesis.request_tag,
    )
)  # fmt: skip
