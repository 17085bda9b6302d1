"""Tensors are cut into parts, and put together from parts, to the last bit."""

import asyncio

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from shared.diffusion.sampling.tensors import pack, unpack
from shared.diffusion.weights.shards import HostBuffers, HostPart, place, whole_tensors
from shared.diffusion.weights.trained_weights import Staging, WeightsInUse, weights_digest
from shared.errors import ContractError, IntegrityError
from shared.run.manifest import FetchedObject, TensorBox
from tests.shared.diffusion.digits import adapter, load_digits
from tests.stored import Given, packed, read_back

NAMED = {
    "a": torch.randn(5, 3),
    "b": torch.arange(7),
    "c.scalar": torch.tensor(3.5, dtype=torch.float64),
    "d": torch.randn(4, 2, 2).to(torch.bfloat16),
    "e.none": torch.empty(0, 4),
    "rng": torch.arange(11, dtype=torch.uint8),
}


def parts_of(tensors: dict[str, Tensor], shard_bytes: int) -> list[HostPart]:
    return HostBuffers(shard_bytes).copy(tensors, {}, is_first=True)


def equal(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> bool:
    return found.keys() == wanted.keys() and all(
        torch.equal(found[n], wanted[n]) and found[n].dtype == wanted[n].dtype for n in wanted
    )


def test_small_tensors_are_the_object_that_they_always_were() -> None:
    assert packed(parts_of(NAMED, 1 << 30)) == pack(NAMED)


@pytest.mark.parametrize("shard_bytes", [1, 16, 70, 1 << 20])
def test_parts_of_any_size_are_the_same_tensors(shard_bytes: int) -> None:
    parts = parts_of(NAMED, shard_bytes)
    assert (len(parts) == 1) == (shard_bytes == 1 << 20)
    assert equal(asyncio.run(whole_tensors(read_back(parts))), NAMED)
    some = asyncio.run(whole_tensors(read_back(parts), "c."))
    assert equal(some, {"c.scalar": NAMED["c.scalar"]})


def test_tensors_are_stored_in_the_type_that_is_asked_for() -> None:
    [part] = HostBuffers(1 << 30).copy(NAMED, {"a": torch.bfloat16}, is_first=True)
    assert torch.equal(unpack(bytes(part.pack()))["a"], NAMED["a"].to(torch.bfloat16))
    assert part.pieces["a"].dtype == "BF16"


def test_what_is_whole_on_every_rank_is_stored_by_the_first() -> None:
    assert not HostBuffers(1 << 30).copy(NAMED, {}, is_first=False)


def test_a_copy_does_not_follow_its_tensor() -> None:
    tensor = torch.zeros(3)
    [part] = parts_of({"a": tensor}, 1 << 30)
    tensor.add_(1)
    assert torch.equal(unpack(bytes(part.pack()))["a"], torch.zeros(3))


def test_buffers_are_kept_from_one_copy_to_the_next() -> None:
    buffers, tensors = HostBuffers(70), {name: each.clone() for name, each in NAMED.items()}
    first = buffers.copy(tensors, {}, is_first=True)
    assert len(first) > 1
    tensors["a"].add_(1)
    second = buffers.copy(tensors, {}, is_first=True)
    assert [each.stored.data_ptr() for each in first] == [each.stored.data_ptr() for each in second]
    assert equal(asyncio.run(whole_tensors(read_back(second))), tensors)
    wider = buffers.copy({**tensors, "z": torch.ones(2)}, {}, is_first=True)
    assert equal(asyncio.run(whole_tensors(read_back(wider))), {**tensors, "z": torch.ones(2)})


boxes = st.tuples(st.integers(0, 5), st.integers(0, 5)).map(sorted)


@settings(max_examples=60)
@given(boxes, boxes)
def test_of_a_piece_what_belongs_here_is_copied(rows: list[int], columns: list[int]) -> None:
    whole = torch.arange(25.0).view(5, 5)
    piece = whole[rows[0] : rows[1], columns[0] : columns[1]]
    box = TensorBox(
        dtype="F32", whole=(5, 5), offset=(rows[0], columns[0]), shape=tuple(piece.shape)
    )
    target = torch.full((5, 5), -1.0)
    assert place(target, piece, box) == piece.numel()
    wanted = torch.full((5, 5), -1.0)
    wanted[rows[0] : rows[1], columns[0] : columns[1]] = piece
    assert torch.equal(target, wanted)


def test_a_shard_that_holds_something_else_than_its_manifest_says_is_refused() -> None:
    first, *others = read_back(parts_of(NAMED, 16)).given
    for data in (pack({"a": torch.zeros(5, 2)}), pack({"x": NAMED["a"]}), b"", first.data[:-1]):
        with pytest.raises(ContractError):
            asyncio.run(whole_tensors(Given([FetchedObject(data, first.pieces), *others])))


def test_tensors_of_which_a_piece_is_missing_are_refused() -> None:
    half = {"a": TensorBox(dtype="F32", whole=(5, 3), offset=(0, 0), shape=(2, 3))}
    with pytest.raises(IntegrityError, match="a "):
        asyncio.run(whole_tensors(Given([FetchedObject(pack({"a": NAMED["a"][:2]}), half)])))


def test_weights_are_staged_shard_by_shard() -> None:
    policy = load_digits()
    tensors = unpack(adapter(policy, 1))
    parts = parts_of(tensors, 3000)
    assert len(parts) > 3
    staging = Staging(policy.model.transformer)
    for part in parts[:-1]:
        staging.add(FetchedObject(bytes(part.pack()), part.pieces))
    with pytest.raises(IntegrityError, match="another adapter"):
        staging.finish()
    staging.add(FetchedObject(bytes(parts[-1].pack()), parts[-1].pieces))
    staged = staging.finish()
    in_use = WeightsInUse(policy.model.transformer)
    assert in_use.adopt(staged) == weights_digest(tensors) == in_use.digest()
