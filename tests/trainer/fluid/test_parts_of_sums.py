"""Ranks divide a piece, and read of stored sums the numbers that they hold."""

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from services.trainer.fluid.exchange import WHOLE_BATCH
from services.trainer.fluid.shard import rank_piece
from services.trainer.fluid.store_exchange import SumObjects
from services.trainer.fluid.sums import Ranges, StoredSum, SumLayout, Term, assembled, overlaps
from shared.diffusion.training.tally import Tally
from shared.errors import ContractError
from shared.messages.fluid import Piece
from shared.store import ObjectStore
from shared.store.folder import FolderBackend

SIZE = 40
TALLY = Tally(num_rows=3).as_dict()


@given(st.integers(1, 40), st.integers(1, 9), st.integers(0, 5))
def test_every_sample_counts_on_one_rank_and_all_take_as_many_passes(
    samples: int, ranks: int, first: int
) -> None:
    piece = Piece(
        group=0, attempt=0, number=0, first_sample=first, num_samples=samples, first_step=1,
        num_steps=2,
    )  # fmt: skip
    parts = [rank_piece(piece, rank, ranks) for rank in range(ranks)]
    counted = [
        sample
        for part in parts
        for given, counts in ((part.own, True), (part.last, part.counts))
        if given is not None and counts
        for sample in given.samples
    ]
    assert sorted(counted) == list(piece.samples)
    assert len({(p.own is None or len(p.own.samples), p.last is None) for p in parts}) == 1
    slices = [given for part in parts for given in (part.own, part.last) if given is not None]
    assert {tuple(given.steps(9)) for given in slices} == {(1, 2)}
    assert all(set(given.samples) <= set(piece.samples) for given in slices)


def ranges_of(numbers: set[int]) -> Ranges:
    found: list[tuple[int, int]] = []
    for number in sorted(numbers):
        if found and sum(found[-1]) == number:
            found[-1] = (found[-1][0], found[-1][1] + 1)
        else:
            found.append((number, 1))
    return tuple(found)


def numbers_of(ranges: Ranges) -> list[int]:
    return [number for first, count in ranges for number in range(first, first + count)]


NUMBERS = st.sets(st.integers(0, SIZE - 1))


@given(NUMBERS, NUMBERS)
def test_overlaps_are_the_numbers_of_both(one: set[int], other: set[int]) -> None:
    mine, theirs = ranges_of(one), ranges_of(other)
    found = []
    for here, there in overlaps(mine, theirs):
        assert numbers_of(mine)[here] == numbers_of(theirs)[there]
        found += numbers_of(mine)[here]
    assert found == sorted(one & other)


@given(NUMBERS, st.lists(st.integers(0, 2), min_size=SIZE, max_size=SIZE))
def test_a_rank_reads_its_numbers_however_the_sum_was_divided(
    held: set[int], owners: list[int]
) -> None:
    whole = torch.arange(SIZE, dtype=torch.float32)
    divided = [ranges_of({n for n in range(SIZE) if owners[n] == rank}) for rank in range(3)]
    parts = [(each, {-1: Term(whole[numbers_of(each)], TALLY)}) for each in divided]
    layout = SumLayout(SIZE, torch.float32, torch.device("cpu"), ranges_of(held))
    term = assembled(parts, layout)[-1]
    assert term.gradient.tolist() == sorted(held)
    assert term.tally == TALLY


def test_a_sum_with_missing_numbers_is_refused() -> None:
    layout = SumLayout(SIZE, torch.float32, torch.device("cpu"))
    part = ((0, 10),), {-1: Term(torch.zeros(10), TALLY)}
    with pytest.raises(ContractError, match="10 of a sum's 40 numbers are stored"):
        assembled([part], layout)


async def test_a_sum_of_groups_is_no_total(tmp_path: Path) -> None:
    layout = SumLayout(4, torch.float32, torch.device("cpu"))
    objects = SumObjects(ObjectStore(FolderBackend(tmp_path)), layout)
    term = Term(torch.ones(4), TALLY)
    stored = [StoredSum(parts=(await objects.put("x", {key: term}),)) for key in (0, WHOLE_BATCH)]
    with pytest.raises(ContractError, match="not a total"):
        await objects.get_total(stored[0])
    found = (await objects.get_total(stored[1])).gradient
    assert found is not None and found.tolist() == [1.0] * 4
