"""Sums of gradients as one flat tensor each, with what happened to their rows."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from pydantic import BaseModel
from torch import Tensor

from services.trainer.fluid.exchange import WHOLE_BATCH, ExchangeIncomplete, MemberRound, Sum
from shared.diffusion.sampling.tensors import pack, unpack
from shared.diffusion.training.tally import Tally
from shared.diffusion.weights.rounding import decode, encode, rounded
from shared.errors import ContractError
from shared.messages.contracts import ObjectRef
from shared.messages.records import Level

GRADIENT, TALLY = "gradient/", "tally/"
"""Prefixes of the names of a stored sum's tensors, followed by the key."""
TALLY_NAMES = tuple(sorted(Tally().as_dict()))


@dataclass(frozen=True, slots=True)
class Term:
    gradient: Tensor | None
    """(number of trained numbers,), the parameters by their names; None is zero."""
    tally: Mapping[str, float]


Ranges = tuple[tuple[int, int], ...]
"""Runs of numbers of a flat gradient, in their order: where each begins, and how many it has."""


@dataclass(frozen=True, slots=True)
class SumLayout:
    """Layout of the flat gradients of a run, and the range that this process holds."""

    size: int
    """Numbers of a whole gradient."""
    dtype: torch.dtype
    device: torch.device
    ranges: Ranges | None = None
    """Range that this process holds, if other ranks of its group hold the rest."""

    @property
    def num_bytes(self) -> int:
        """Bytes of a whole gradient."""
        return self.size * self.dtype.itemsize

    @property
    def held(self) -> Ranges:
        return ((0, self.size),) if self.ranges is None else self.ranges

    @property
    def num_held(self) -> int:
        return sum(number for _, number in self.held)

    def zeros(self) -> Tensor:
        return torch.zeros(self.num_held, dtype=self.dtype, device=self.device)

    def check(self, gradient: Tensor) -> None:
        """Raises ContractError if it is a sum of other weights."""
        number = self.num_held
        if (gradient.shape, gradient.dtype) != ((number,), self.dtype):
            raise ContractError(
                f"a sum of {list(gradient.shape)} {gradient.dtype}, not of {number} {self.dtype}"
            )


def overlaps(mine: Ranges, theirs: Ranges) -> Iterator[tuple[slice, slice]]:
    """Yields the common elements of two flat tensors: a slice of mine and a slice of theirs.

    >>> list(overlaps(((4, 4), (10, 2)), ((0, 6), (11, 5))))
    [(slice(0, 2, None), slice(4, 6, None)), (slice(5, 6, None), slice(6, 7, None))]
    """
    place = other = mine_before = theirs_before = 0
    while place < len(mine) and other < len(theirs):
        (a, n), (b, m) = mine[place], theirs[other]
        first, last = max(a, b), min(a + n, b + m)
        if first < last:
            shift, other_shift = mine_before - a, theirs_before - b
            yield (
                slice(shift + first, shift + last),
                slice(other_shift + first, other_shift + last),
            )
        if a + n <= b + m:
            place, mine_before = place + 1, mine_before + n
        else:
            other, theirs_before = other + 1, theirs_before + m


class SumPart(BaseModel, frozen=True):
    """Location of a process's part of a sum, and its range."""

    ref: ObjectRef
    ranges: Ranges


class StoredSum(BaseModel):
    """Location of a member's sum: the part of each of its processes; the first part has the
    tallies."""

    parts: tuple[SumPart, ...]


def tally_row(tally: Mapping[str, float]) -> Tensor:
    """Returns a tally as a tensor (names,)."""
    return torch.tensor([tally[name] for name in TALLY_NAMES], dtype=torch.float64)


def parse_tally(row: Tensor) -> dict[str, float]:
    """Parse a row of `tally_row`; raises ContractError if it is invalid."""
    if (row.shape, row.dtype) != ((len(TALLY_NAMES),), torch.float64):
        raise ContractError(f"no tally: {list(row.shape)} {row.dtype}")
    return dict(zip(TALLY_NAMES, row.tolist(), strict=True))


def pack_sum(own: Sum, level: Level = "exact") -> bytes:
    """Writes a member's sum as safetensors."""
    tensors: dict[str, Tensor] = {}
    for key, term in own.items():
        tensors[f"{TALLY}{key}"] = tally_row(term.tally)
        if term.gradient is not None and can_round(term.gradient, level):
            encoded = encode(term.gradient, level).items()
            tensors |= {f"{GRADIENT}{key}/{part}": each.cpu() for part, each in encoded}
        elif term.gradient is not None:
            tensors[f"{GRADIENT}{key}"] = term.gradient
    return pack(tensors)


def can_round(gradient: Tensor, level: Level) -> bool:
    return level != "exact" and bool(gradient.isfinite().all())


def round_gradient(gradient: Tensor, level: Level) -> Tensor:
    """Return what a reader of the packed gradient finds."""
    return rounded(gradient, level) if can_round(gradient, level) else gradient


def round_terms(own: Sum, level: Level) -> Sum:
    """Round each gradient by itself."""
    return {
        key: each if each.gradient is None
        else Term(round_gradient(each.gradient, level), each.tally)
        for key, each in own.items()
    }  # fmt: skip


def unpack_sum(data: bytes, layout: SumLayout) -> dict[int, Term]:
    """Read a sum, on the CPU; raises ContractError if it has another layout."""
    tensors = unpack(data)
    terms: dict[int, Term] = {}
    try:
        keys = [int(name.removeprefix(TALLY)) for name in tensors if name.startswith(TALLY)]
        for key in keys:
            gradient = tensors.get(f"{GRADIENT}{key}")
            start = f"{GRADIENT}{key}/"
            rounded_parts = {n[len(start) :]: t for n, t in tensors.items() if n.startswith(start)}
            if rounded_parts:
                gradient = decode(rounded_parts, layout.num_held)
            if gradient is not None:
                layout.check(gradient)
            terms[key] = Term(gradient, parse_tally(tensors[f"{TALLY}{key}"]))
    except ValueError as error:
        raise ContractError(f"not a sum: {error}") from error
    return terms


def assembled(parts: Sequence[tuple[Ranges, Mapping[int, Term]]], layout: SumLayout) -> Sum:
    """Returns what the layout holds of a sum, of which these are parts, the first with the tallies.

    Raises:
        ContractError: if numbers are missing.
    """
    [(ranges, first), *others] = parts
    if not others and ranges == layout.held:
        return first
    terms = {}
    for key, term in first.items():
        gradients = [
            (ranges_of_part, part[key].gradient) for ranges_of_part, part in parts if key in part
        ]
        if all(each is None for _, each in gradients):
            terms[key] = Term(None, term.tally)
            continue
        whole, missing = torch.zeros_like(layout.zeros(), device="cpu"), 0
        for ranges_of_part, gradient in gradients:
            for here, theirs in overlaps(layout.held, ranges_of_part):
                missing += here.stop - here.start
                if gradient is not None:
                    whole[here] = gradient[theirs]
        if missing != len(whole):
            raise ContractError(f"{missing} of a sum's {len(whole)} numbers are stored")
        terms[key] = Term(whole, term.tally)
    return terms


def added(terms: Iterable[Term], layout: SumLayout) -> Term:
    """Returns the sum of terms, added one after the other, on the layout's device."""
    total: Tensor | None = None
    tally = Tally()
    for term in terms:
        tally.merge(term.tally)
        if term.gradient is None:
            continue
        here = term.gradient.to(layout.device)
        total = here.clone() if total is None else total.add_(here)
    return Term(layout.zeros() if total is None else total, tally.as_dict())


def addition_order(round_: MemberRound) -> list[tuple[str, int]]:
    """Return the members and keys of all terms in the order of addition: the order of the shares,
    or of the groups."""
    if round_.by_group:
        return [(worker, group) for group, worker in round_.owner_of.items()]
    return [(share.worker, WHOLE_BATCH) for share in round_.contributors]


def in_order(sums: Mapping[str, Sum], round_: MemberRound) -> list[Term]:
    """Returns the terms of all members in the order in which they are added.

    Raises:
        ExchangeIncomplete: if a sum lacks an entry of its share.
    """
    wanted = addition_order(round_)
    missing = {worker for worker, key in wanted if key not in sums.get(worker, {})}
    if missing:
        raise ExchangeIncomplete("the sums do not match their shares", tuple(sorted(missing)))
    return [sums[worker][key] for worker, key in wanted]
