"""Fluid devices in the pure core: pieces, sums, exchange, step and commit."""

from collections import Counter
from dataclasses import replace
from typing import Any

from services.scheduler.core.fluid.events import MemberReported
from services.scheduler.core.inputs import (
    MachineInput,
    RecoveryDone,
    Tick,
    WorkerJoined,
    WorkerLeft,
)
from services.scheduler.core.machine import step
from services.scheduler.core.state import Plan, State
from shared.learning.advantages import Advantages
from shared.messages.contracts import (
    FragmentFailed,
    GenerateFragment,
    GroupRequest,
    OperatorRequest,
    PolicyPublished,
    TrainGroup,
)
from shared.messages.fluid import (
    ExchangeMissed,
    ExchangeSums,
    PieceReleased,
    PieceTrained,
    Stepped,
    SumHeld,
    TakeStep,
    TrainPiece,
    WeightsStored,
)
from shared.messages.workers import Holds
from tests import examples

CHECKSUM = "0" * 32


class Run:
    """A run whose commands are collected."""

    def __init__(self, members: int = 2, ranks: int = 1, **changes: Any) -> None:
        plan = examples.plan(**{"mode": "fluid", "tag": 0, **changes})
        self.plan: Plan = replace(plan, trained_steps=6)
        self.ranks = ranks
        self.state = State(recovering=True)
        self.now = 0.0
        self.commands: list[Any] = []
        self.give(self.published(0), RecoveryDone())
        for number in range(members):
            self.join(number)

    def give(self, *events: MachineInput, seconds: float = 0.01) -> None:
        for event in events:
            self.now += seconds
            self.state, commands = step(self.plan, self.state, event, self.now)
            self.commands += commands

    def published(self, version: int) -> PolicyPublished:
        return examples.published(version).model_copy(update={"checksum": CHECKSUM})

    def join(self, number: int, version: int = 0) -> None:
        name = f"trainer-{number}"
        self.give(WorkerJoined(f"{name}-a", name, "trainer", concurrency=1, ranks=self.ranks))
        self.give(MemberReported(f"{name}-a", holds(version)))

    def take(self, kind: type[Any]) -> list[Any]:
        """Commands of a kind that were given, which are taken out."""
        found = [each for each in self.commands if isinstance(each, kind)]
        self.commands = [each for each in self.commands if not isinstance(each, kind)]
        return found

    def generate(self, batch: int | None = None) -> None:
        """Have all fragments generated and scored; with ``batch``, those of this batch alone."""
        others = []
        while tasks := self.take(GenerateFragment):
            for task in tasks:
                if batch in (None, task.fragment.batch):
                    self.give(examples.generated(task), examples.scored(task))
                else:
                    others.append(task)
        self.commands += others

    def train(self, but: str = "") -> None:
        """Have all pieces trained, but those of one member."""
        while pieces := self.take(TrainPiece):
            for piece in pieces:
                if piece.worker != but:
                    self.give(trained(piece))

    def exchange(self) -> ExchangeSums:
        self.generate()
        self.train()
        [command] = self.take(ExchangeSums)
        assert isinstance(command, ExchangeSums)
        return command

    def stepped(self) -> tuple[list[str], TakeStep]:
        """Have the batch trained and everybody take its step; return who has, and the order."""
        command = self.exchange()
        holders = [share.worker for share in command.shares]
        self.give(*(held(command, worker) for worker in holders))
        [order] = self.take(TakeStep)
        self.give(*(stepped(order, worker) for worker in holders))
        return holders, order


def holds(version: int, host: str = "") -> Holds:
    return Holds(version=version, checksum=CHECKSUM, host=host, update=0, sum_bytes=0)


def trained(piece: TrainPiece) -> PieceTrained:
    return PieceTrained(**piece.answer_fields, seconds=0.1, pass_rows=0)


def held(command: ExchangeSums, worker: str, sum_id: int = 7) -> SumHeld:
    return SumHeld(
        **command.answer_fields, worker=worker, sum_id=f"{sum_id:064x}", norm=1.0, finite=True,
        scale=1.0, seconds=0.0,
    )  # fmt: skip


def stepped(command: TakeStep, worker: str) -> Stepped:
    return Stepped(
        **command.answer_fields, worker=worker, policy=examples.policy(1), checksum=CHECKSUM,
        is_reference=False, seconds=0.0,
    )  # fmt: skip


def stored(command: TakeStep, digest: int = 1) -> WeightsStored:
    return WeightsStored(
        batch=command.batch, attempt=command.attempt, worker=command.committer,
        policy=examples.policy(1, weights=digest), weights=examples.ref("weights"),
    )  # fmt: skip


def test_pieces_make_up_the_batch_and_are_exchanged_once() -> None:
    run = Run()
    command = run.exchange()
    cells = Counter(
        (piece.group, sample, part)
        for share in command.shares
        for piece in share.pieces
        for sample in piece.samples
        for part in piece.steps
    )
    assert set(cells.values()) == {1}
    assert len(cells) == 2 * 4 * 6
    assert {share.worker for share in command.shares} == {"trainer-0-a", "trainer-1-a"}
    run.give(Tick())
    assert run.take(ExchangeSums) == []


def test_members_of_a_host_stand_together_but_in_a_round_after_one_that_came_to_nothing() -> None:
    run = Run(members=4)
    for number, host in enumerate(("a1", "b2", "a1", "")):
        run.give(MemberReported(f"trainer-{number}-a", holds(0, host)))
    command = run.exchange()
    assert [share.worker[-3] for share in command.shares] == ["0", "2", "1", "3"]
    assert command.hosts == (2, 1, 1)
    for share in command.shares:
        run.give(ExchangeMissed(
            **command.answer_fields, worker=share.worker, missing=("trainer-1-a",), reason="",
        ))  # fmt: skip
    run.train()
    [again] = run.take(ExchangeSums)
    assert again.round == 1 and again.hosts == () and len(again.shares) == 4


def test_hosts_of_a_site_stand_together_if_there_are_others_and_they_reach_each_other() -> None:
    def groups(*places: str) -> tuple[str, tuple[int, ...], tuple[int, ...]]:
        """Order, hosts and sites for members at "host/site"."""
        run = Run(members=len(places))
        for number, place in enumerate(places):
            host, _, site = place.partition("/")
            holds = Holds(version=0, checksum=CHECKSUM, host=host, site=site, update=0, sum_bytes=0)
            run.give(MemberReported(f"trainer-{number}-a", holds))
        command = run.exchange()
        order = "".join(share.worker[-3] for share in command.shares)
        return order, command.hosts, command.sites

    assert groups("a/lab", "b/home", "a/lab", "c/lab") == ("0231", (2, 1, 1), (2, 1))
    assert groups("/lab", "/home", "/lab", "") == ("0213", (1, 1, 1, 1), (2, 1, 1))
    assert groups("a/lab", "b/lab", "c/lab") == ("012", (), ()), "one site: as without sites"
    assert groups("a/lab", "b/home", "c/office") == ("012", (), ())
    assert groups("a", "b", "a") == ("021", (2, 1), ()), "none reaches others"


def test_over_the_batchs_deviation_groups_are_sent_together_and_all_again_if_one_changes() -> None:
    run = Run(advantages=Advantages(std="batch"))
    tasks = run.take(GenerateFragment)
    for task in tasks[:-1]:
        run.give(examples.generated(task), examples.scored(task))
    assert run.take(TrainGroup) == []
    run.give(examples.generated(tasks[-1]), examples.scored(tasks[-1]))
    groups = run.take(TrainGroup)
    rewards = [[r for part in group.fragments for r in part.rewards] for group in groups]
    wanted = run.plan.advantages.for_batch([(each, {"proxy": each}) for each in rewards])
    assert [group.advantages for group in groups] == wanted
    run.take(TrainPiece)
    slot = tasks[0].fragment.slot
    run.give(FragmentFailed(slot=slot, stage="admission", reason="broken", worker=None))
    [task] = run.take(GenerateFragment)
    run.give(examples.generated(task), examples.scored(task, (9.0,) * task.fragment.num_samples))
    again = run.take(TrainGroup)
    assert [(group.group, group.attempt) for group in again] == [(0, 1), (1, 1)]
    assert again[1].advantages != groups[1].advantages
    assert {piece.piece.attempt for piece in run.take(TrainPiece)} == {1}


def test_over_the_batchs_deviation_all_groups_wait_for_a_mend_while_the_run_is_paused() -> None:
    run = Run(advantages=Advantages(std="batch"))
    tasks = run.take(GenerateFragment)
    run.give(OperatorRequest(action="pause", id="1"))
    for task in tasks:
        broken = task is tasks[0]
        rewards = (None,) * task.fragment.num_samples if broken else None
        run.give(examples.generated(task), examples.scored(task, *([rewards] if broken else [])))
    assert run.take(TrainGroup) == []
    run.give(GroupRequest(action="again", batch=0, group=tasks[0].fragment.group, id="2"))
    run.give(OperatorRequest(action="resume", id="3"))
    [task] = run.take(GenerateFragment)
    run.give(examples.generated(task), examples.scored(task))
    groups = run.take(TrainGroup)
    assert len(groups) == 2
    assert all(None not in part.rewards for group in groups for part in group.fragments)


def test_a_group_whose_message_no_member_can_read_is_sent_once_more() -> None:
    run = Run()
    run.generate()
    sent = run.take(TrainGroup)
    for _ in range(run.plan.max_attempts):
        piece = next(each for each in run.take(TrainPiece) if each.piece.group == 0)
        run.give(PieceReleased(**piece.answer_fields, reason="faulty"))
    [again] = run.take(TrainGroup)
    assert (again.group, again.attempt) == (0, sent[0].attempt + 1)
    assert run.state.phase == "running"
    run.train()
    [command] = run.take(ExchangeSums)
    attempts = {(each.group, each.attempt) for share in command.shares for each in share.pieces}
    assert attempts == {(0, 1), (1, 0)}


def test_early_fragments_are_by_the_committed_version_and_wait_for_pieces() -> None:
    run = Run(members=1, max_staleness=1)
    run.generate(0)
    early = run.take(GenerateFragment)
    assert {(each.fragment.batch, each.policy.version) for each in early} <= {(1, 0)}
    run.train()
    run.give(Tick())
    early += run.take(GenerateFragment)
    assert {(each.fragment.batch, each.policy.version) for each in early} == {(1, 0)}


def test_the_step_waits_for_every_member_and_is_ordered_once() -> None:
    run = Run()
    command = run.exchange()
    run.give(held(command, "trainer-0-a"))
    assert run.take(TakeStep) == []
    run.give(held(command, "trainer-1-a"), held(command, "trainer-1-a"))
    [order] = run.take(TakeStep)
    assert order.sum_id == f"{7:064x}"
    assert order.committer == command.committer


def test_what_a_lost_member_had_is_given_to_others_under_other_numbers() -> None:
    run = Run()
    run.generate()
    given = [piece for piece in run.commands if isinstance(piece, TrainPiece)]
    lost = {(p.piece.group, p.piece.number) for p in given if p.worker == "trainer-0-a"}
    run.train(but="trainer-0-a")
    run.give(WorkerLeft("trainer-0-a"))
    run.train()
    [command] = run.take(ExchangeSums)
    [share] = command.shares
    assert lost and lost.isdisjoint({(p.group, p.number) for p in share.pieces})


def test_a_member_whose_sum_is_not_its_share_begins_another() -> None:
    run = Run()
    command = run.exchange()
    for share in command.shares:
        missing = (share.worker,) if share.worker == "trainer-0-a" else ()
        run.give(ExchangeMissed(
            batch=0, attempt=0, round=0, worker=share.worker, missing=missing, update=0, reason=""
        ))  # fmt: skip
    run.train()
    [again] = run.take(ExchangeSums)
    numbers = {share.worker: share.sum_number for share in again.shares}
    assert (again.round, numbers) == (1, {"trainer-0-a": 1, "trainer-1-a": 0})


def test_whoever_does_not_answer_in_time_is_out() -> None:
    run = Run()
    command = run.exchange()
    run.give(ExchangeMissed(
        **command.answer_fields, worker="trainer-0-a", missing=("trainer-1-a",), reason="",
    ))  # fmt: skip
    run.give(Tick(), seconds=command.max_seconds + 10)
    run.train()
    [again] = run.take(ExchangeSums)
    assert [share.worker for share in again.shares] == ["trainer-0-a"]


def test_a_member_that_others_miss_twice_is_out_and_they_go_on() -> None:
    """Its connection to the others is broken, not the one to the scheduler: it answers as well."""
    run = Run(members=3)
    command = run.exchange()
    for number in (0, 1):
        assert (command.round, len(command.shares)) == (number, 3)
        for share in command.shares:
            missing = () if share.worker == "trainer-2-a" else ("trainer-2-a",)
            run.give(ExchangeMissed(
                **command.answer_fields, worker=share.worker, missing=missing, reason=""
            ))  # fmt: skip
        run.train()
        [command] = run.take(ExchangeSums)
    assert [share.worker for share in command.shares] == ["trainer-0-a", "trainer-1-a"]


def test_the_next_batch_begins_before_the_commit_and_is_trained_after_it() -> None:
    run = Run()
    run.stepped()
    run.take(TrainGroup)
    run.generate()
    assert run.take(TrainGroup) == []
    run.give(run.published(1))
    assert {group.batch for group in run.take(TrainGroup)} == {1}


def test_who_only_generates_goes_on_once_the_weights_are_stored_and_is_told_where() -> None:
    run, name = Run(num_groups=8), "rollout-0"
    run.give(WorkerJoined(f"{name}-a", name, "rollout", concurrency=1))
    holders, order = run.stepped()
    assert {task.worker for task in run.take(GenerateFragment)} == set(holders)
    other = stored(order, digest=2)
    run.give(other)
    assert run.take(GenerateFragment) == [], "of a version that nobody has"
    run.give(stored(order))
    tasks = run.take(GenerateFragment)
    assert {(task.worker, task.fragment.batch) for task in tasks} == {(f"{name}-a", 1)}
    assert {task.weights for task in tasks} == {examples.ref("weights")}
    assert {task.policy for task in tasks} == {examples.policy(1)}
    run.give(run.published(1))
    run.give(*(examples.generated(task) for task in tasks))
    assert {task.weights for task in run.take(GenerateFragment)} == {None}


def test_what_is_generated_by_stored_weights_is_discarded_if_their_version_is_lost() -> None:
    run, name = Run(num_groups=8), "rollout-0"
    run.give(WorkerJoined(f"{name}-a", name, "rollout", concurrency=1))
    holders, order = run.stepped()
    run.give(stored(order))
    run.generate()
    following = run.state.find_batch(1)
    assert following is not None
    assert examples.policy(1) in {group.policy for group in following.groups}
    run.give(*(WorkerLeft(worker) for worker in holders))
    run.join(2)
    run.train()
    following = run.state.find_batch(1)
    assert following is not None
    assert all(group.policy is None for group in following.groups)
    assert run.state.fluid is not None and run.state.fluid.stored_weights is None
