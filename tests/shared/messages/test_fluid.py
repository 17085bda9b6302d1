"""Messages of fluid devices: what they refuse, and that the largest fits the bus."""

from random import Random

import pytest
from pydantic import ValidationError

from shared.limits import MAX_MEMBERS, MAX_PIECES, MAX_SUMS_BYTES
from shared.messages import subjects
from shared.messages.codec import decode, encode
from shared.messages.fluid import ExchangeSums, Piece, PieceTrained, Share
from shared.process.worker import new_address
from tests import examples


def exchange(pieces: list[Piece], members: int) -> ExchangeSums:
    addresses = [new_address(f"a-gpu-host-{place // 8}-{place % 8}") for place in range(members)]
    return ExchangeSums(
        batch=123456, attempt=0, round=0, policy=examples.policy(3), committer=addresses[0],
        shares=tuple(
            Share(worker=address, sum_number=1, pieces=tuple(pieces[place::members]))
            for place, address in enumerate(addresses)
        ),
        max_seconds=60.0, update=0,
    )  # fmt: skip


def pieces_of(number: int) -> list[Piece]:
    return [
        Piece(
            group=n // 8, attempt=n % 2, number=n % 8, first_sample=n % 16, num_samples=1,
            first_step=3 * (n % 3), num_steps=3,
        )
        for n in range(number)
    ]  # fmt: skip


def test_a_piece_has_a_slot_of_its_own_at_each_attempt_of_the_batch() -> None:
    """A scheduler that knows nothing of the attempt before gives the same numbers again."""
    [piece] = pieces_of(1)
    answers = [
        PieceTrained(
            batch=0,
            attempt=attempt,
            update=0,
            worker="a",
            piece=piece,
            sum_number=0,
            seconds=1.0,
            pass_rows=0,
        )
        for attempt in (0, 1000)
    ]
    assert len({subjects.message_subject("demo", each) for each in answers}) == 2


@pytest.mark.parametrize("members", [1, 64, 1024, MAX_MEMBERS])
def test_the_most_pieces_of_a_batch_fit_one_message(members: int) -> None:
    pieces = pieces_of(MAX_PIECES)
    Random(0).shuffle(pieces)
    message = exchange(pieces, members)
    data = encode(message)
    assert len(data) <= MAX_SUMS_BYTES
    assert decode(data) == message


def test_a_committer_without_a_share_is_refused() -> None:
    message = exchange([], 2)
    with pytest.raises(ValidationError, match="the committer has no share"):
        ExchangeSums(**{**message.model_dump(exclude={"policy", "shares"}), "committer": "other",
                        "policy": message.policy, "shares": message.shares})  # fmt: skip


def test_readers_of_a_member_and_of_its_batch() -> None:
    assert subjects.pieces_for("demo", "a-1") == "dg.demo.fluid.*.piece.a-1.>"
    assert subjects.fluid_subjects("demo") == [
        "dg.demo.fluid.*.exchange.>",
        "dg.demo.fluid.*.step.>",
        "dg.demo.fluid.*.commit.>",
        "dg.demo.fluid.*.again.>",
        "dg.demo.fluid.*.reference.>",
    ]
    assert subjects.batch_subject("demo", subjects.FLUID, 3) == "dg.demo.fluid.3.>"
