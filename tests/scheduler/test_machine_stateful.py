"""The machine against every order of events, with repeats, faults and restarts among them."""

from collections import Counter

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from services.scheduler.machine import Input, WorkerJoined, WorkerLeft, step
from services.scheduler.state import State
from shared.contracts import (
    Command,
    FragmentFailed,
    FragmentSlot,
    GenerateFragment,
    OperatorRequest,
    PolicyPublished,
    TrainGroup,
)
from tests import examples


class SchedulerModel(RuleBasedStateMachine):
    """Plays rollout, reward, trainer and operator; the slots of the bus are sets here."""

    @initialize(groups=st.integers(1, 3), fragments=st.integers(1, 3), batches=st.integers(1, 3))
    def begin(self, groups: int, fragments: int, batches: int) -> None:
        self.plan = examples.plan(
            num_groups=groups, group_size=2 * fragments, num_batches=batches, max_attempts=1000
        )
        self.state = State()
        self.seen: list[Input] = []
        self.slots: dict[FragmentSlot, GenerateFragment] = {}
        self.to_generate: list[GenerateFragment] = []
        self.to_score: list[GenerateFragment] = []
        self.sent: dict[tuple[int, int], TrainGroup] = {}
        self.trained: Counter[tuple[int, int, int]] = Counter()
        self.send(examples.published(0))

    def send(self, event: Input) -> None:
        self.seen.append(event)
        self.state, commands = step(self.plan, self.state, event)
        for command in commands:
            self.receive(command)

    def receive(self, command: Command) -> None:
        if isinstance(command, TrainGroup):
            self.sent[command.batch, command.group] = command
        elif command.fragment.slot not in self.slots:
            self.slots[command.fragment.slot] = command
            self.to_generate.append(command)

    @precondition(lambda self: self.to_generate)
    @rule(data=st.data())
    def generate(self, data: st.DataObject) -> None:
        task = self.to_generate.pop(data.draw(st.integers(0, len(self.to_generate) - 1)))
        self.to_score.append(task)
        self.send(examples.generated(task))

    @precondition(lambda self: self.to_score)
    @rule(data=st.data(), rewards=st.tuples(st.floats(0, 1), st.floats(0, 1)))
    def score(self, data: st.DataObject, rewards: tuple[float, float]) -> None:
        task = self.to_score.pop(data.draw(st.integers(0, len(self.to_score) - 1)))
        self.send(examples.scored(task, rewards))

    @precondition(lambda self: self.slots)
    @rule(data=st.data(), stage=st.sampled_from(["rollout", "reward", "delivery", "admission"]))
    def fail(self, data: st.DataObject, stage: str) -> None:
        slot = data.draw(st.sampled_from(list(self.slots)))
        self.send(FragmentFailed.model_validate({"slot": slot, "stage": stage, "reason": "fault"}))

    @rule(joined=st.booleans(), worker=st.sampled_from(["a", "b", "c"]))
    def worker(self, joined: bool, worker: str) -> None:
        self.send(WorkerJoined(worker, "rollout") if joined else WorkerLeft(worker))

    @rule(action=st.sampled_from(["pause", "resume", "stop", "resume"]))
    def operate(self, action: str) -> None:
        self.send(OperatorRequest.model_validate({"action": action, "id": "x"}))

    @precondition(lambda self: self.batch_is_sent())
    @rule()
    def commit(self) -> None:
        assert self.state.batch is not None
        batch = self.state.batch.index
        for group in range(self.plan.num_groups):
            for fragment in self.sent[batch, group].fragments:
                for sample in fragment.fragment.samples:
                    self.trained[batch, group, sample] += 1
        self.send(examples.published(batch + 1))

    @rule(data=st.data())
    def redeliver(self, data: st.DataObject) -> None:
        event = data.draw(st.sampled_from(self.seen))
        if not isinstance(event, OperatorRequest | WorkerJoined | WorkerLeft):
            state, commands = step(self.plan, self.state, event)
            assert commands == [] or self.is_fresh_failure(event)
            if not commands:
                assert state == self.state or isinstance(event, FragmentFailed)

    @rule()
    def the_scheduler_is_killed_and_recovers(self) -> None:
        """A fresh state, the newest commit, then every stored event again: nothing new is done."""
        commits = [event for event in self.seen if isinstance(event, PolicyPublished)]
        recovered = State()
        for event in [commits[-1], *self.seen]:
            recovered, commands = step(self.plan, recovered, event)
            for command in commands:
                if isinstance(command, GenerateFragment):
                    assert command == self.slots.get(command.fragment.slot, command)
        assert recovered.policy == self.state.policy
        if self.state.batch is not None and recovered.batch is not None:
            for mine, theirs in zip(self.state.batch.groups, recovered.batch.groups, strict=True):
                assert mine.sent == theirs.sent

    def is_fresh_failure(self, event: Input) -> bool:
        return isinstance(event, FragmentFailed)

    def batch_is_sent(self) -> bool:
        batch = self.state.batch
        return batch is not None and all(group.sent for group in batch.groups)

    @invariant()
    def every_sample_is_trained_at_most_once(self) -> None:
        assert all(count == 1 for count in getattr(self, "trained", Counter()).values())

    @invariant()
    def staleness_is_zero(self) -> None:
        for task in getattr(self, "slots", {}).values():
            assert task.fragment.batch == task.policy.version

    @invariant()
    def a_group_is_of_one_version(self) -> None:
        for group in getattr(self, "sent", {}).values():
            assert {fragment.policy for fragment in group.fragments} == {group.policy}


TestScheduler = SchedulerModel.TestCase
TestScheduler.settings = settings(max_examples=100, stateful_step_count=50, deadline=None)
