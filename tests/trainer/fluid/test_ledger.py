"""What a member follows of what the scheduler says, whatever comes in whatever order."""

from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st

from services.trainer.fluid.ledger import Ledger
from shared.messages.fluid import ExchangeSums, Piece, Share, TakeStep, TrainPiece
from tests import examples

ME = "a"
SUM_ID = "f" * 64


def piece(group: int, number: int = 0) -> Piece:
    return Piece(
        group=group, attempt=0, number=number, first_sample=0, num_samples=4, first_step=0,
        num_steps=2,
    )  # fmt: skip


def train(group: int, *, batch: int = 0, attempt: int = 0, number: int = 0) -> TrainPiece:
    return TrainPiece(
        batch=batch, attempt=attempt, worker=ME, piece=piece(group), sum_number=number,
        policy=examples.policy(batch), update=0,
    )  # fmt: skip


def exchange(
    *groups: int, batch: int = 0, attempt: int = 0, round: int = 0, number: int = 0, who: str = ME
) -> ExchangeSums:
    share = Share(worker=who, sum_number=number, pieces=tuple(piece(each) for each in groups))
    return ExchangeSums(
        batch=batch, attempt=attempt, round=round, policy=examples.policy(batch), committer=who,
        shares=(share,), max_seconds=1.0, update=0,
    )  # fmt: skip


def take(message: ExchangeSums, sum_id: str = SUM_ID) -> TakeStep:
    return TakeStep(
        batch=message.batch, attempt=message.attempt, round=message.round, sum_id=sum_id,
        norm=1.0, finite=True, scale=1.0, committer="a", update=0,
    )  # fmt: skip


def a_member() -> Ledger:
    ledger = Ledger(ME)
    ledger.use(0)
    return ledger


def trained(ledger: Ledger, *groups: int, number: int = 0) -> Ledger:
    for group in groups:
        assert ledger.begin_piece(train(group, number=number))
        ledger.add(piece(group))
    return ledger


def test_a_sum_that_is_its_share_takes_part_and_steps_once() -> None:
    ledger, message = trained(a_member(), 0, 1), exchange(1, 0)
    assert ledger.hear_round(message) == "follow"
    assert not ledger.hear_step(take(message))  # the total is not here yet
    ledger.hold(message, SUM_ID)
    assert not ledger.hear_step(take(message, sum_id="0" * 64))
    assert ledger.hear_step(take(message))
    ledger.use(1)
    assert not ledger.hear_step(take(message))


def test_a_sum_that_lacks_a_piece_or_has_one_too_many_or_is_spoilt_misses_the_round() -> None:
    assert trained(a_member(), 0).hear_round(exchange(0, 1)) == "missed"
    assert trained(a_member(), 0, 1).hear_round(exchange(0)) == "missed"
    spoilt = trained(a_member(), 0)
    spoilt.is_spoilt = True
    assert spoilt.hear_round(exchange(0)) == "missed"


def test_an_older_round_is_dropped_and_one_without_this_member_ends_the_one_before() -> None:
    ledger = trained(a_member(), 0)
    assert ledger.hear_round(exchange(0, round=1)) == "follow"
    assert ledger.hear_round(exchange(0, round=1)) == "drop"
    assert ledger.hear_round(exchange(0, round=0)) == "drop"
    ledger.hold(exchange(0, round=1), SUM_ID)
    assert ledger.hear_round(exchange(0, round=2, who="b")) == "left_out"
    assert not ledger.hear_step(take(exchange(0, round=1)))


def test_a_larger_number_begins_an_empty_sum() -> None:
    ledger = trained(a_member(), 0, 1)
    assert ledger.begin_piece(train(2, number=1))
    assert ledger.is_empty
    ledger.add(piece(2))
    assert not ledger.begin_piece(train(1, number=0))
    assert ledger.hear_round(exchange(0, 1, number=0)) == "missed"
    assert ledger.hear_round(exchange(2, round=1, number=1)) == "follow"


def test_a_voided_sum_of_nothing_takes_part_in_the_step() -> None:
    ledger = trained(a_member(), 0)
    assert ledger.hear_round(exchange(number=1)) == "follow"
    assert ledger.is_empty


def test_a_piece_counts_once_in_a_sum_and_again_in_the_next() -> None:
    """A scheduler that knows nothing of the first sum gives the same names to its pieces."""
    ledger = trained(a_member(), 0)
    assert not ledger.begin_piece(train(0))
    assert ledger.begin_piece(train(0, attempt=1000)) and ledger.is_empty


def test_another_attempt_at_the_batch_begins_an_empty_sum() -> None:
    ledger = trained(a_member(), 0)
    assert ledger.hear_round(exchange(0, attempt=1)) == "missed"
    assert not ledger.begin_piece(train(0))
    assert ledger.begin_piece(train(0, attempt=1))


@dataclass
class Others:
    """What was said and done, kept apart from the ledger's own state."""

    summed: dict[tuple[int, int], list[int]] = field(default_factory=dict)
    steps: list[tuple[int, int, int]] = field(default_factory=list)


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["train", "round", "hold", "step", "empty"]),
            st.integers(0, 2),  # group, or round
            st.integers(0, 1),  # attempt
            st.integers(0, 1),  # number of the sum
        ),
        max_size=30,
    )
)
def test_no_order_of_messages_lets_a_member_step_twice_or_from_another_share(
    events: list[tuple[str, int, int, int]],
) -> None:
    ledger, others, held = a_member(), Others(), None
    newest = (-1, -1)
    for what, index, attempt, number in events:
        of = others.summed.setdefault((attempt, number), [])
        if what == "train" and ledger.begin_piece(train(index, attempt=attempt, number=number)):
            assert index not in of or ledger.is_empty
            if ledger.is_empty:
                of.clear()
            ledger.add(piece(index))
            of.append(index)
        elif what in ("round", "empty"):
            groups = of if what == "round" else []
            message = exchange(*groups, round=index, attempt=attempt, number=number)
            verdict = ledger.hear_round(message)
            assert (verdict == "drop") == ((attempt, index) <= newest or bool(others.steps))
            newest = max(newest, (attempt, index))
            if verdict == "follow":
                assert {each.group for each in ledger.pieces} == set(groups)
                held = message
        elif what == "hold" and held is not None and ledger.is_current(held):
            ledger.hold(held, SUM_ID)
        elif what == "step" and held is not None and ledger.hear_step(take(held)):
            assert (held.attempt, held.round) == newest
            others.steps.append((held.batch, held.attempt, held.round))
            ledger.use(1)
    assert len(others.steps) <= 1
