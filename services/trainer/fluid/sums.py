"""Sums of gradients as one flat tensor each, with what happened to their rows."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from services.trainer.fluid.exchange import ALL, Meeting, Missed, Sum
from shared.diffusion.tensors import pack, unpack
from shared.diffusion.training.tally import Tally
from shared.errors import ContractError

GRADIENT, TALLY = "gradient/", "tally/"
"""Begin the names of a stored sum's tensors, which go on with its key."""
TALLY_NAMES = tuple(sorted(Tally().as_dict()))


@dataclass(frozen=True, slots=True)
class Term:
    gradient: Tensor | None
    """(number of trained numbers,), the parameters by their names; None is zero."""
    tally: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class SumLayout:
    """What the flat gradients of a run look like."""

    size: int
    dtype: torch.dtype
    device: torch.device

    def zeros(self) -> Tensor:
        return torch.zeros(self.size, dtype=self.dtype, device=self.device)

    def check(self, gradient: Tensor) -> None:
        """Raises ContractError if it is a sum of other weights."""
        if (gradient.shape, gradient.dtype) != ((self.size,), self.dtype):
            raise ContractError(
                f"a sum of {list(gradient.shape)} {gradient.dtype}, not of {self.size} {self.dtype}"
            )


def tally_row(tally: Mapping[str, float]) -> Tensor:
    """Returns a tally as a tensor (names,)."""
    return torch.tensor([tally[name] for name in TALLY_NAMES], dtype=torch.float64)


def tally_of(row: Tensor) -> dict[str, float]:
    """Reads what `tally_row` gives; raises ContractError if it is none."""
    if (row.shape, row.dtype) != ((len(TALLY_NAMES),), torch.float64):
        raise ContractError(f"no tally: {list(row.shape)} {row.dtype}")
    return dict(zip(TALLY_NAMES, row.tolist(), strict=True))


def pack_sum(own: Sum) -> bytes:
    """Writes a member's sum as safetensors."""
    tensors: dict[str, Tensor] = {}
    for key, term in own.items():
        tensors[f"{TALLY}{key}"] = tally_row(term.tally)
        if term.gradient is not None:
            tensors[f"{GRADIENT}{key}"] = term.gradient
    return pack(tensors)


def unpack_sum(data: bytes, layout: SumLayout) -> dict[int, Term]:
    """Reads a sum, on the CPU; raises ContractError if it is none of this run."""
    tensors = unpack(data)
    found: dict[int, Term] = {}
    try:
        keys = [int(name.removeprefix(TALLY)) for name in tensors if name.startswith(TALLY)]
        for key in keys:
            gradient = tensors.get(f"{GRADIENT}{key}")
            if gradient is not None:
                layout.check(gradient)
            found[key] = Term(gradient, tally_of(tensors[f"{TALLY}{key}"]))
    except ValueError as error:
        raise ContractError(f"not a sum: {error}") from error
    return found


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


def in_order(sums: Mapping[str, Sum], meeting: Meeting) -> list[Term]:
    """Returns the terms of all members in the order in which they are added: that of the shares, or
    that of the groups.

    Raises:
        Missed: if a sum lacks what its share says.
    """
    wanted = (
        [(worker, group) for group, worker in meeting.owner_of.items()]
        if meeting.by_group
        else [(share.worker, ALL) for share in meeting.contributors]
    )
    missing = {worker for worker, key in wanted if key not in sums.get(worker, {})}
    if missing:
        raise Missed("sums are not made of what their shares say", tuple(sorted(missing)))
    return [sums[worker][key] for worker, key in wanted]
