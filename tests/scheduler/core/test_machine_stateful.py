"""The machine against every order of events, with repeats and faults among them."""

from collections import Counter

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from services.scheduler.core.inputs import (
    DeviceReported,
    MachineInput,
    Tick,
    WorkerJoined,
    WorkerLeft,
)
from services.scheduler.core.machine import step
from services.scheduler.core.state import State
from shared.messages.contracts import (
    Command,
    FragmentFailed,
    FragmentReleased,
    FragmentSlot,
    GenerateFragment,
    GroupRequest,
    OperatorRequest,
    SetDevice,
    TagRequest,
    TrainGroup,
    WorkerRequest,
)
from tests import examples

MEMBERS = [WorkerJoined(f"trainer-{each}", f"trainer-{each}", "trainer") for each in "ab"]


class SchedulerModel(RuleBasedStateMachine):
    """Plays rollout, reward, trainer and operator; the slots of the bus are sets here."""

    @initialize(
        groups=st.integers(1, 3),
        fragments=st.integers(1, 3),
        batches=st.integers(1, 3),
        staleness=st.integers(0, 1),
        fixed=st.booleans(),
        members=st.integers(1, 2),
    )
    def begin(
        self, groups: int, fragments: int, batches: int, staleness: int, fixed: bool, members: int
    ) -> None:
        self.plan = examples.plan(
            num_groups=groups, group_size=2 * fragments, num_batches=batches, max_attempts=1000,
            max_losses=1000, max_staleness=staleness,
            fragment_size=2 if fixed else "auto",
        )  # fmt: skip
        self.state = State()
        self.now = 0.0
        self.seen: list[MachineInput] = []
        self.slots: dict[tuple[str, FragmentSlot], GenerateFragment] = {}
        self.results: set[FragmentSlot] = set()
        self.to_generate: list[GenerateFragment] = []
        self.to_score: list[GenerateFragment] = []
        self.sent: dict[tuple[int, int], TrainGroup] = {}
        self.trained: Counter[tuple[int, int, int]] = Counter()
        self.loan_numbers: dict[str, list[int]] = {}
        for member in MEMBERS[:members]:
            self.send(member)
        self.send(examples.published(0))

    def send(self, event: MachineInput) -> None:
        self.seen.append(event)
        self.now += 1.0
        self.state, commands = step(self.plan, self.state, event, self.now)
        for command in commands:
            self.receive(command)

    def receive(self, command: Command) -> None:
        if isinstance(command, TrainGroup):
            self.sent[command.batch, command.group] = command
        elif isinstance(command, SetDevice):
            self.loan_numbers.setdefault(command.worker, []).append(command.loan_number)
        elif isinstance(command, GenerateFragment):
            known = self.state.workers.get(command.worker)
            assert known is None or known.name not in self.state.draining
            key = command.worker, command.fragment.slot
            assert key not in self.slots, "its slot is taken: the device would never see it"
            self.slots[key] = command
            self.to_generate.append(command)

    @precondition(lambda self: self.to_generate)
    @rule(data=st.data())
    def generate(self, data: st.DataObject) -> None:
        task = self.to_generate.pop(data.draw(st.integers(0, len(self.to_generate) - 1)))
        if task.fragment.slot not in self.results:
            self.results.add(task.fragment.slot)
            self.to_score.append(task)
            self.send(examples.generated(task))

    @precondition(lambda self: self.to_generate)
    @rule(data=st.data())
    def return_fragments(self, data: st.DataObject) -> None:
        task = self.to_generate.pop(data.draw(st.integers(0, len(self.to_generate) - 1)))
        self.send(FragmentReleased(slot=task.fragment.slot, worker=task.worker, reason="stale"))

    @precondition(lambda self: self.to_score)
    @rule(data=st.data(), reward=st.one_of(st.floats(0, 1), st.none()))
    def score(self, data: st.DataObject, reward: float | None) -> None:
        task = self.to_score.pop(data.draw(st.integers(0, len(self.to_score) - 1)))
        self.send(examples.scored(task, (reward,) * task.fragment.num_samples))

    @precondition(lambda self: self.slots)
    @rule(data=st.data(), stage=st.sampled_from(["rollout", "reward", "delivery", "admission"]))
    def fail(self, data: st.DataObject, stage: str) -> None:
        _, slot = data.draw(st.sampled_from(list(self.slots)))
        self.send(FragmentFailed.model_validate({"slot": slot, "stage": stage, "reason": "fault"}))

    @rule(joined=st.booleans(), worker=st.sampled_from(["a", "b", "c"]), life=st.integers(0, 3))
    def worker(self, joined: bool, worker: str, life: int) -> None:
        address = f"{worker}-{life}-{len(self.seen)}"
        known = [w for w in self.state.workers.values() if w.name == worker]
        if joined:
            self.send(WorkerJoined(address, worker, "rollout"))
        elif known:
            self.send(WorkerLeft(known[0].address))

    @rule(action=st.sampled_from(["pause", "resume", "stop", "resume"]))
    def operate(self, action: str) -> None:
        self.send(OperatorRequest.model_validate({"action": action, "id": "x"}))

    @rule(action=st.sampled_from(["drain", "undrain"]), worker=st.sampled_from(["a", "b", "c"]))
    def drain(self, action: str, worker: str) -> None:
        request = {"action": action, "worker": worker, "id": "x"}
        self.send(WorkerRequest.model_validate(request))

    @rule(batch=st.integers(0, 3), group=st.integers(0, 3))
    def do_again(self, batch: int, group: int) -> None:
        self.send(GroupRequest(action="again", batch=batch, group=group, id="x"))

    @rule(mode=st.sampled_from(["auto", "off", "fixed"]), groups=st.integers(0, 3))
    def choose_tag(self, mode: str, groups: int) -> None:
        self.send(TagRequest.model_validate({"mode": mode, "groups": groups, "id": "x"}))

    @rule(mode=st.sampled_from(["train", "generate"]), member=st.sampled_from(["a", "b"]))
    def report_device(self, mode: str, member: str) -> None:
        worker = self.state.workers.get(f"trainer-{member}")
        number = worker.loan.number if worker is not None and worker.loan is not None else 0
        self.send(DeviceReported(f"trainer-{member}", number, mode))  # type: ignore[arg-type]

    @rule()
    def time_passes(self) -> None:
        self.now += 60.0
        self.send(Tick())

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
        """A result or a commit that was seen before commands nothing new."""
        event = data.draw(st.sampled_from(self.seen))
        repeatable = event.__class__.__name__ in {
            "FragmentGenerated", "FragmentScored", "PolicyPublished"
        }  # fmt: skip
        if repeatable:
            before = self.state.batches
            self.state, commands = step(self.plan, self.state, event, self.now)
            for command in commands:
                self.receive(command)
            if not commands:
                assert [b.index for b in self.state.batches] == [b.index for b in before]

    def batch_is_sent(self) -> bool:
        batch = self.state.batch
        return batch is not None and all(group.sent for group in batch.groups)

    @invariant()
    def every_sample_is_trained_at_most_once(self) -> None:
        assert all(count == 1 for count in getattr(self, "trained", Counter()).values())

    @invariant()
    def staleness_is_within_its_limit(self) -> None:
        for task in getattr(self, "slots", {}).values():
            assert (
                0 <= task.fragment.batch - task.policy.version <= self.plan.schedule.staleness_limit
            )

    @invariant()
    def a_group_is_of_one_version(self) -> None:
        for group in getattr(self, "sent", {}).values():
            assert {fragment.policy for fragment in group.fragments} == {group.policy}

    @invariant()
    def a_group_that_is_sent_is_whole(self) -> None:
        for group in getattr(self, "sent", {}).values():
            samples = [sample for f in group.fragments for sample in f.fragment.samples]
            assert samples == list(range(self.plan.group_size))

    @invariant()
    def loan_numbers_only_grow(self) -> None:
        for numbers in getattr(self, "loan_numbers", {}).values():
            assert numbers == sorted(set(numbers))


TestScheduler = SchedulerModel.TestCase
TestScheduler.settings = settings(stateful_step_count=50)
