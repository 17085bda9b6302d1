"""Rounds of members behind slow lines: their limit, who commits, who is out, and how a run ends."""

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.scheduler import limits
from services.scheduler.core.fluid.events import MemberReported
from services.scheduler.core.fluid.links import choose_committer
from services.scheduler.core.inputs import LinkMeasured, Tick, WorkerLeft
from shared.messages.contracts import GenerateFragment
from shared.messages.fluid import ExchangeMissed, ExchangeSums, Piece, Share, TakeStep, TrainPiece
from shared.messages.workers import Holds
from tests import examples
from tests.scheduler.core.slow_lines import NEAR_MBIT, Member, SlowLines
from tests.scheduler.core.test_fluid import CHECKSUM, Run, held, stepped

MB = 10**6
MBIT = 1e6 / 8


def run_of(size: int, *mbits: float | None) -> Run:
    """A run of members with sums of ``size`` bytes, behind lines of so many Mbit/s; None: not
    measured."""
    run = Run(members=len(mbits))
    for number, rate in enumerate(mbits):
        address = f"trainer-{number}-a"
        holds = Holds(version=0, checksum=CHECKSUM, update=0, sum_bytes=size)
        run.give(MemberReported(address, holds))
        if rate is not None:
            each = 1 / (rate * MBIT)
            run.give(LinkMeasured(address, each, each))
    return run


def miss(run: Run, command: ExchangeSums, missing: dict[str, tuple[str, ...]]) -> None:
    """Have members answer that the round came to nothing."""
    for worker, names in missing.items():
        run.give(ExchangeMissed(**command.answer_fields, worker=worker, missing=names, reason=""))


def test_a_round_s_limit_follows_from_its_bytes_and_the_slowest_line() -> None:
    assert run_of(418 * MB, 1000, 1000).exchange().max_seconds == limits.MIN_EXCHANGE_S
    assert run_of(418 * MB, None, None).exchange().max_seconds == limits.MIN_EXCHANGE_S
    slow = run_of(418 * MB, 1000, 50).exchange()
    assert slow.committer == "trainer-0-a"
    assert slow.max_seconds > 2 * (2 * 418 / 6.25)
    assert run_of(20 * MB, 1000, 1).exchange().max_seconds > 2 * (2 * 20 / 0.125)
    fixed = Run(slot_deadline_s=7.0)
    assert fixed.exchange().max_seconds == 7.0


def test_a_limit_is_enough_for_the_sums_of_many_at_a_slow_committer() -> None:
    command = run_of(418 * MB, *(50.0 for _ in range(8))).exchange()
    assert command.max_seconds > 9 * 418 / 6.25


def test_the_committer_is_whose_version_leaves_soonest_and_pieces_break_ties() -> None:
    assert run_of(20 * MB, 1000, 10).exchange().committer == "trainer-0-a"
    assert run_of(20 * MB, 10, 1000).exchange().committer == "trainer-1-a"
    assert run_of(418 * MB, 100, None).exchange().committer == "trainer-1-a", "as 1 Gbit/s"
    assert run_of(418 * MB, 1000, None).exchange().committer == "trainer-0-a", "measured ones first"
    alike = run_of(20 * MB, 9000, 10000).exchange()
    most = max(alike.shares, key=lambda share: (len(share.pieces), share.worker))
    assert alike.committer == most.worker


@pytest.mark.parametrize(
    ("size", "mbits", "by_store"),
    [
        (20 * MB, (1000, 1000, 10), True),
        (20 * MB, (None, None, 10), True),
        (418 * MB, (10_000, None, None), False),
        (418 * MB, (100, 100, 100), False),
        (20_000, (1000, 1000, 10), False),
    ],
    ids=["slow", "others not measured", "not measured", "all alike", "quick"],
)
def test_sums_go_through_the_store_where_a_measured_line_is_slow(
    size: int, mbits: tuple[float | None, ...], by_store: bool
) -> None:
    run = run_of(size, *mbits)
    assert run.exchange().by_store == by_store


def test_sums_go_through_the_store_after_a_round_without_a_total() -> None:
    run = run_of(20 * MB, None, None)
    command = run.exchange()
    miss(run, command, {share.worker: () for share in command.shares})
    [following] = run.take(ExchangeSums)
    assert (command.by_store, following.by_store) == (False, True)


rates = st.none() | st.floats(0.1, 1e4)


@given(st.lists(st.tuples(rates, st.integers(0, 5)), min_size=1, max_size=6))
def test_no_member_s_version_would_leave_a_second_sooner(
    members: list[tuple[float | None, int]],
) -> None:
    run = run_of(100 * MB, *(rate for rate, _ in members))
    shares = [
        Share(worker=f"trainer-{number}-a", sum_number=0, pieces=tuple(
            Piece(group=0, attempt=0, number=n, first_sample=n, num_samples=1, first_step=0,
                  num_steps=1) for n in range(count)
        )) for number, (_, count) in enumerate(members)
    ]  # fmt: skip
    fluid = run.state.fluid
    assert fluid is not None
    chosen = choose_committer(run.state, fluid, shares)
    rate, pieces = members[int(chosen.split("-")[1])]
    fastest = max(1000 if each is None else each for each, _ in members)
    assert 3200 / (1000 if rate is None else rate) < 3200 / fastest + 1
    if {each for each, _ in members} == {None}:
        assert pieces == max(count for _, count in members)


def test_a_committer_that_was_too_slow_is_not_named_again_while_there_are_others() -> None:
    run, named = run_of(20 * MB, 1000, 100, 10), []
    command = run.exchange()
    for _ in range(3):
        named.append(command.committer)
        others = {share.worker: (command.committer,) for share in command.shares}
        miss(run, command, {**others, command.committer: ()})
        run.train()
        [command] = run.take(ExchangeSums)
    assert named == ["trainer-0-a", "trainer-1-a", "trainer-2-a"]
    assert command.num_failures == 3
    assert len(command.shares) == 3


@given(st.data())
def test_a_committer_that_has_answered_is_never_out(data: st.DataObject) -> None:
    run = Run(members=3)
    command = run.exchange()
    for _ in range(4):
        names = [share.worker for share in command.shares]
        some = st.sets(st.sampled_from(names)).map(lambda found: tuple(sorted(found)))
        miss(run, command, {name: data.draw(some) for name in names})
        assert run.state.fluid is not None
        assert command.committer not in run.state.fluid.out
        run.train()
        [command] = run.take(ExchangeSums)


def test_attempts_that_nobody_s_death_explains_fail_the_run_in_one_line() -> None:
    run = run_of(418 * MB, 1000, None)
    for attempt in range(8):
        command = run.exchange()
        assert command.attempt == attempt
        run.give(Tick(), seconds=command.max_seconds + 10)
        run.give(Tick())
    assert run.state.phase == "failed"
    assert run.state.failure == (
        "batch 0 came to nothing 8 times, although no process died; trainer-0-a, trainer-1-a did "
        f"not exchange 418,000,000 bytes within {command.max_seconds:.0f} s"
    )


def test_attempts_in_which_a_process_died_are_not_counted() -> None:
    run = run_of(418 * MB, 1000, 1000)
    for attempt in range(20):
        command = run.exchange()
        assert command.attempt == attempt
        run.give(WorkerLeft("trainer-1-a"))
        run.train()
        [command] = run.take(ExchangeSums)
        run.give(Tick(), seconds=command.max_seconds + 10)
        run.join(1)
    assert run.state.phase == "running"


def test_rounds_that_come_to_nothing_fail_the_run_with_member_bytes_and_seconds() -> None:
    run = run_of(418 * MB, 1000, 1000)
    command = run.exchange()
    for _ in range(6):
        miss(run, command, {share.worker: () for share in command.shares})
        run.train()
        [command] = run.take(ExchangeSums) or [command]
    assert run.state.failure is not None
    assert "6 exchanges came to nothing, one after another; trainer-" in run.state.failure
    assert "did not exchange 418,000,000 bytes within 60 s" in run.state.failure


def test_a_step_does_not_forget_the_bytes_of_a_sum() -> None:
    run = run_of(418 * MB, 1000, 1000)
    command = run.exchange()
    workers = [share.worker for share in command.shares]
    run.give(*(held(command, worker) for worker in workers))
    [order] = run.take(TakeStep)
    run.give(*(stepped(order, worker) for worker in workers))
    assert run.state.fluid is not None
    assert {each.sum_bytes for each in run.state.fluid.holds.values()} == {418 * MB}


def test_a_lie_about_the_bytes_of_a_sum_lasts_no_longer_than_a_batch() -> None:
    run = run_of(20 * MB, 1000, 1000)
    lie = Holds(version=0, checksum=CHECKSUM, update=0, sum_bytes=2**62)
    run.give(MemberReported("liar-a", lie))
    assert run.state.fluid is not None and run.state.fluid.sum_bytes == 20 * MB
    run = run_of(2**62, 1000)
    for number in range(3):
        honest = lie.model_copy(update={"sum_bytes": 20 * MB})
        run.give(MemberReported(f"honest-{number}-a", honest))
    run.give(run.published(1))
    assert run.state.fluid is not None and run.state.fluid.sum_bytes == 20 * MB


def wait(run: Run, seconds: int) -> None:
    for _ in range(seconds):
        run.give(Tick(), seconds=1.0)


def test_a_piece_that_waited_behind_fragments_is_not_late() -> None:
    """Fragments come before pieces: the time in which they are generated is no delay of a piece."""
    run = Run(members=1, num_groups=3, slot_deadline_s=10.0)
    while tasks := run.take(GenerateFragment):
        for task in tasks:
            wait(run, 6)
            run.give(examples.generated(task), examples.scored(task))
    assert run.take(TrainPiece)[0].worker == "trainer-0-a"
    run.join(1)
    wait(run, 8)
    assert run.state.fluid is not None
    assert run.state.fluid.out == frozenset()
    wait(run, 4)
    assert run.state.fluid.out


def simulated(
    near: int, mbits: float, *, by_group: bool = False, near_group_s: float = 40.0
) -> SlowLines:
    """FLUX.1 with ``near`` members and one behind a line of so many Mbit/s, which trains a group
    in 40 s and so is the fastest: three batches."""
    plan = replace(
        examples.plan(mode="fluid", tag=0, num_groups=12, num_batches=3), trained_steps=6
    )
    names = [f"trainer-{number}-a" for number in range(near + 1)]
    members = {name: Member(name, NEAR_MBIT, 5.0, near_group_s) for name in names[:-1]}
    members[names[-1]] = Member(names[-1], mbits, 5.0, 40.0)
    return SlowLines(plan, members, 418 * MB, by_group)


@pytest.mark.parametrize("by_group", [False, True])
@pytest.mark.parametrize("mbits", [1000, 300, 50, 1])
@pytest.mark.parametrize(("near", "near_group_s"), [(1, 40.0), (8, 110.0), (8, 40.0)])
def test_a_slow_line_never_stops_a_run(
    near: int, near_group_s: float, mbits: float, by_group: bool
) -> None:
    """One near member and one behind 50 Mbit/s once made 749 attempts and no version, and eight
    slower ones with a fast one behind 300 Mbit/s made 247."""
    run = simulated(near, mbits, by_group=by_group, near_group_s=near_group_s)
    state = run.run(1e6)
    assert state.phase == "finished", state.failure
    rounds = Counter(message.batch for message in run.rounds)
    assert rounds.keys() == {0, 1, 2}
    assert rounds[0] <= 3 + by_group, "a process group shows nobody who is slow"
    assert max(rounds[1], rounds[2]) <= 3
    assert {message.attempt for message in run.rounds} == {0}
    last = {message.batch: message for message in run.rounds}
    far = f"trainer-{near}-a"
    if mbits < 1000:
        assert far not in {last[batch].committer for batch in (1, 2)}
    near_ones = run.members.keys() - {far}
    for message in last.values():
        assert near_ones <= {share.worker for share in message.shares}, "nobody near is out"


def test_a_member_alone_behind_a_slow_line_commits_what_takes_longer_than_two_minutes() -> None:
    """Weights and moments take 28 minutes at 8 Mbit/s."""
    run = simulated(0, 8)
    assert run.run(1e6).phase == "finished"
    assert run.committers == []
