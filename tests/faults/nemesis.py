"""Makes faults at random times in a simulated cluster, and in the end makes peace."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from random import Random
from typing import Literal

from services.scheduler.sim.batches import Trainer
from services.scheduler.sim.broker import RUN
from services.scheduler.sim.cluster import Cluster
from services.scheduler.sim.devices import SimRollout
from services.scheduler.sim.world import Process
from shared.messages.contracts import OperatorRequest, TagRequest
from tests.faults.schedules import Schedule

OPERATOR_S = 3.0
"""An operator looks at the run this often, and resumes it if it has failed."""
ZOMBIE_S = 9.0
"""A process that has a successor lives on for so long at most."""
MAX_DEVICES = 5
FORGED = 2**40
"""A version that nobody has made."""
RESUMED = {"failed": "failure", "paused": "pause", "stopped": "stop"}
FAILPOINTS = (
    "issued", "sent a group", "gave a gradient", "lent", "called back", "took back", "took back",
)  # fmt: skip
SHARES = (0, 1, 1, 2, 8)
"""How much a schedule favours a kind of fault; one that lacks some kinds reaches other states."""

Kind = Literal["rollout", "reward", "trainer", "scheduler"]
KINDS: tuple[Kind, ...] = ("rollout", "reward", "trainer", "scheduler")


@dataclass(slots=True)
class Nemesis:
    cluster: Cluster
    schedule: Schedule
    at_peace: bool = False
    zombies: list[Process] = field(default_factory=list)
    """Processes that have a successor, and do not know it."""
    _random: Random = field(init=False)
    _weights: list[int] = field(init=False)
    """Weights of the kinds of faults."""
    _num_requests: int = 0
    _num_joined: int = 0

    def __post_init__(self) -> None:
        self._random = Random(self.schedule.seed + 1_000_003)
        self._weights = [self._random.choice(SHARES) for _ in FAULTS]
        if not any(self._weights):
            self._weights = [1] * len(FAULTS)

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
        for process in self._processes():
            process.heal()
        cluster.scheduler.commands_left = cluster.scheduler.failpoint = None
        for worker in cluster.rollout.values():
            worker.loads_wrongly = worker.dies_with_gradient = False
            worker.gradient_failure, worker.on_gradient = 0.0, None
        for kind in ("scheduler", "reward", "trainer"):
            self._restart(kind, kind)
        for name in cluster.rollout:
            self._restart("rollout", name)

    def _strike(self) -> None:
        """Make one fault, now and then two at once."""
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
        """Mostly short; one in three is longer than a worker's lease."""
        random = self._random
        return random.uniform(5.5, 9.0) if random.random() < 0.33 else random.uniform(0.05, 3.0)

    def _later(self, seconds: float, action: Callable[[], None]) -> None:
        self.cluster.world.at(self.cluster.world.now + seconds, action)

    def _operate(self) -> None:
        """Resume a run that failed, and in the end one that was paused."""
        phase = self.cluster.scheduler.state.phase
        if phase == "failed" or (self.at_peace and phase in RESUMED):
            self.cluster.history.fault(f"run resumed after {RESUMED[phase]}")
            self._request("resume")
        self._later(OPERATOR_S, self._operate)

    def _request(self, action: Literal["pause", "resume", "stop"]) -> None:
        self._num_requests += 1
        self.cluster.broker.publish(
            OperatorRequest(action=action, id=f"{RUN}-{self._num_requests}")
        )

    # --- faults: each gives its target, or None if there is nothing to fail now ---

    def kill(self, kind: Kind) -> str | None:
        process = self._any(kind)
        if process is None:
            return None
        process.kill()
        self._later(self._duration(), lambda: self._restart(kind, process.name))
        return process.name

    def hold(self, kind: Kind, how: Callable[[Process, float], None]) -> str | None:
        """Pause a process, or cut it off."""
        process = self._any(kind)
        if process is None:
            return None
        seconds = self._duration()
        how(process, seconds)
        return f"{process.name} {seconds:.1f} s"

    def drain_rollout(self) -> str | None:
        worker = self._any_rollout()
        if worker is None or worker.process.paused_until > self.cluster.world.now:
            return None
        self._drain(worker)
        return worker.address

    def hang_rollout(self) -> str | None:
        """A device reports and finishes nothing any more, not even in peace."""
        worker = self._dispensable()
        if worker is None:
            return None
        worker.hangs = True
        return worker.address

    def blind_rollout(self) -> str | None:
        """A device believes in a version that nobody has made, even in peace."""
        worker = self._dispensable()
        if worker is None:
            return None
        worker.newest = FORGED
        return worker.address

    def _dispensable(self) -> SimRollout | None:
        """A device beside another one that works."""
        rollout = self.cluster.rollout.values()
        able = [w for w in rollout if not w.hangs and w.newest < FORGED]
        return self._random.choice(able) if len(able) > 1 else None

    def join(self) -> str | None:
        if len(self.cluster.rollout) >= MAX_DEVICES:
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
        self._succeed(worker)
        return worker.address

    def kill_gradient_device(self) -> str | None:
        """Kill a device asked for a gradient, at once or when it is stored and not announced."""
        return self._ambush("killed", lambda worker: worker.process.kill())

    def succeed_gradient_device(self) -> str | None:
        """A device asked for a gradient hangs, another takes its place, and then it goes on."""
        return self._ambush("hung", self._succeed)

    def drain_gradient_device(self) -> str | None:
        """Drain a device that is asked for a gradient."""
        return self._ambush("drained", self._drain)

    def succeed_trainer(self) -> str | None:
        """A zombie trainer goes on beside its successor, and commits if it can."""
        trainer = self._trainer
        if not trainer.process.alive:
            return None
        self._hang(trainer.process)
        self._later(self._random.uniform(0.1, 2.0), self._start_trainer)
        return trainer.address

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
        for seconds in range(1, 10):
            self._later(float(seconds), self._restart_scheduler)
        return scheduler.failpoint

    def stop_broker(self) -> str | None:
        """The broker cannot be reached for a while; it forgets nothing."""
        seconds = self._duration()
        for process in self._processes():
            process.cut_off(seconds)
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
        request = TagRequest(
            mode=self._random.choice(("auto", "off", "fixed", "fixed")),
            groups=self._random.randint(1, self.schedule.plan.num_groups),
            id=f"{RUN}-{self._num_requests}",
        )
        self.cluster.broker.publish(request)
        return request.mode

    # --- what they are made of ---

    @property
    def _trainer(self) -> Trainer:
        assert self.cluster.trainer is not None
        return self.cluster.trainer

    def _processes(self) -> list[Process]:
        cluster = self.cluster
        rollout = [worker.process for worker in cluster.rollout.values()]
        return [*rollout, self._trainer.process, cluster.reward.process, cluster.scheduler.process]

    def _any(self, kind: Kind) -> Process | None:
        if kind == "rollout":
            worker = self._any_rollout()
            return None if worker is None else worker.process
        return next((p for p in self._processes() if p.alive and p.name == kind), None)

    def _any_rollout(self) -> SimRollout | None:
        alive = [w for w in self.cluster.rollout.values() if w.process.alive]
        return self._random.choice(alive) if alive else None

    def _ambush(self, what: str, fault: Callable[[SimRollout], None]) -> str | None:
        """A device dies soon after it is asked for a gradient."""
        able = [w for w in self.cluster.rollout.values() if w.process.alive and w.can_train]
        if not able:
            return None
        worker = self._random.choice(able)
        worker.dies_with_gradient = what == "killed" and self._random.random() < 0.5

        def strike() -> None:
            if worker.process.alive and not self.at_peace:
                self.cluster.history.fault(f"gradient device {what}", worker.address)
                fault(worker)

        if not worker.dies_with_gradient:
            begun = 1.5 * self._random.random()
            worker.on_gradient = lambda seconds: self._later(begun * seconds, strike)
        name = worker.process.name
        for after in range(4, 40, 4):
            self._later(float(after), lambda: self._restart_rollout(name))
        return worker.address

    def _drain(self, worker: SimRollout) -> None:
        worker.drain()
        self._later(self._duration(), lambda: self._restart_rollout(worker.process.name))

    def _succeed(self, worker: SimRollout) -> None:
        self._hang(worker.process)
        name, kind = worker.process.name, worker.kind
        self._later(self._random.uniform(0.1, 3.0), lambda: self._start_rollout(name, kind))

    def _hang(self, process: Process) -> None:
        hang = process.pause if self._random.random() < 0.5 else process.cut_off
        hang(self._random.uniform(0.5, 7.0))

    def _mislead(self, worker: SimRollout) -> None:
        wrong = self._random.random() < self.schedule.wrong_weights
        worker.loads_wrongly = wrong and not self.at_peace
        worker.gradient_failure = 0.0 if self.at_peace else self.schedule.gradient_failure

    def _start_rollout(self, name: str, kind: str) -> None:
        if not self.at_peace:
            self._outlive(self.cluster.rollout[name].process)
            self._mislead(self.cluster.add_rollout(name, kind))

    def _start_trainer(self) -> None:
        if not self.at_peace:
            self._outlive(self._trainer.process)
            self.cluster.add_trainer()

    def _outlive(self, process: Process) -> None:
        self.zombies.append(process)
        self._later(ZOMBIE_S, process.kill)

    def _restart(self, kind: Kind, name: str) -> None:
        restart = {
            "reward": self._restart_reward,
            "trainer": self._restart_trainer,
            "scheduler": self._restart_scheduler,
        }
        restart.get(kind, partial(self._restart_rollout, name))()

    def _restart_rollout(self, name: str) -> None:
        worker = self.cluster.rollout[name]
        if not worker.process.alive:
            self._mislead(self.cluster.add_rollout(name, worker.kind))

    def _restart_reward(self) -> None:
        if not self.cluster.reward.process.alive:
            self.cluster.restart_reward()

    def _restart_trainer(self) -> None:
        if not self._trainer.process.alive:
            self.cluster.add_trainer()

    def _restart_scheduler(self) -> None:
        if not self.cluster.scheduler.process.alive:
            self.cluster.history.fault("scheduler restarts")
            self.cluster.restart_scheduler()


Make = Callable[[Nemesis], str | None]
FAULTS: tuple[tuple[str, Make], ...] = (
    *((f"kill {kind}", partial(Nemesis.kill, kind=kind)) for kind in KINDS),
    *((f"pause {kind}", partial(Nemesis.hold, kind=kind, how=Process.pause)) for kind in KINDS),
    *((f"cut off {kind}", partial(Nemesis.hold, kind=kind, how=Process.cut_off)) for kind in KINDS),
    ("drain rollout", Nemesis.drain_rollout),
    ("hang rollout", Nemesis.hang_rollout),
    ("blind rollout", Nemesis.blind_rollout),
    ("join", Nemesis.join),
    ("succeed rollout", Nemesis.succeed_rollout),
    ("kill gradient device", Nemesis.kill_gradient_device),
    ("succeed gradient device", Nemesis.succeed_gradient_device),
    ("drain gradient device", Nemesis.drain_gradient_device),
    ("succeed trainer", Nemesis.succeed_trainer),
    ("kill between commands", Nemesis.kill_between_commands),
    ("kill after a command", Nemesis.kill_after_a_command),
    ("stop broker", Nemesis.stop_broker),
    ("lose statuses", Nemesis.lose_statuses),
    ("pause run", Nemesis.pause_run),
    ("request TAG", Nemesis.request_tag),
)
"""Faults by name; a sweep has to meet every one."""
