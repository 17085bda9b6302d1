"""A trainer whose devices go together: they train a group, or generate while they would wait.

One device, or several that share what they hold. Ready training goes first: a borrowed device is
back within a denoising step, and keeps what it had begun for the next loan.
"""

from collections import deque
from dataclasses import dataclass, field

from services.scheduler.costs.noise import trainer_device
from services.scheduler.sim.batches import Trainer
from services.scheduler.sim.devices import result_of
from shared.devices.loan import may_generate
from shared.messages.contracts import GenerateFragment, Message


@dataclass(slots=True)
class Helping:
    """A fragment on one of the trainer's devices."""

    task: GenerateFragment
    left: float
    """Seconds of generation still to do."""
    total: float
    generation: int


@dataclass(slots=True)
class SimTrainer(Trainer):
    slots: int = 1
    """Fragments that it generates at the same time."""
    _training: bool = False
    _helping: list[Helping] = field(default_factory=list)
    _waiting: deque[GenerateFragment] = field(default_factory=deque)
    _running: bool = False
    """The devices are in the middle of a denoising step."""
    _switched: bool = False
    """The devices are set up for generation."""
    _transaction: int = 0
    """Counts changes of weights: what was trained before one is not added up after it."""

    def _act(self) -> None:
        """Train what is ready as soon as no device is in the middle of a step; else help."""
        if self._training or self._running or self._stepping:
            return
        group = self._next_group()
        if group is not None:
            self._train(group)
        elif self._is_complete:
            self._commit()
        elif may_generate(self.loan, self.process.world.now):
            self._help()

    def _next_group(self) -> int | None:
        left = [index for index in self._ready if index not in self._trained]
        if not left or self._holds:
            return None
        in_order = self.plan.schedule.deterministic
        return min(left) if not in_order or min(left) == len(self._trained) else None

    def _train(self, index: int) -> None:
        self._training = True
        group, transaction = self._ready[index], self._transaction
        back = self.timing.switch / 2 if self._switched else 0.0
        self._switched = False
        seconds = self.history.drawn(trainer_device(0), self.timing.train(self.plan.group_size))
        self.history.trains(self.address, group, back, seconds)

        def done() -> None:
            self._training = False
            if transaction == self._transaction:
                self._count(group, seconds)
            self._act()

        self.process.after(back + seconds, done)

    def _uses_optimizer(self, seconds: float) -> None:
        self.history.commits(self.address, seconds)

    def _given(self, message: Message) -> None:
        assert isinstance(message, GenerateFragment)
        self._waiting.append(message)
        self._act()

    def _drop(self) -> None:
        """Say what is dropped: a task may have come before the command, or a restarted scheduler
        may not know that it gave it."""
        for task in [*(work.task for work in self._helping), *self._waiting]:
            self._release(task, "returned")
        self._helping.clear()
        self._waiting.clear()

    def _help(self) -> None:
        """Every device takes one denoising step of its fragment."""
        assert self.policy is not None
        while self._waiting and len(self._helping) < self.slots:
            task = self._waiting.popleft()
            if task.policy != self.policy:
                self._release(task, "stale")
                continue
            seconds = self.timing.help(task.fragment.num_samples)
            seconds = self.history.drawn(trainer_device(len(self._helping)), seconds)
            self._helping.append(Helping(task, seconds, seconds, self.history.begins()))
        if not self._helping:
            return
        setup = 0.0 if self._switched else self.timing.switch / 2
        self._switched, self._running = True, True
        stepping = list(self._helping)
        seconds_each = [work.total / self.timing.steps for work in stepping]
        self.history.steps(self.address, setup, seconds_each)
        self.process.after(setup + max(seconds_each), lambda: self._stepped(stepping))

    def _stepped(self, stepping: list[Helping]) -> None:
        assert self.policy is not None
        self._running = False
        for work in stepping:
            work.left -= work.total / self.timing.steps
            if work.left <= 1e-9 and work in self._helping:
                self._helping.remove(work)
                digest = self.policy.weights_digest
                self.broker.send(self.process, result_of(
                    work.task, digest, self.address, work.total, work.generation
                ))  # fmt: skip
        self._act()

    def _drop_stale(self) -> None:
        """What was begun with weights that are no longer there cannot be finished."""
        self._transaction += 1
        for work in [w for w in self._helping if w.task.policy != self.policy]:
            self._helping.remove(work)
            self._release(work.task, "stale")
