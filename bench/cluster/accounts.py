"""What an emulated member's sum is: the pieces in it, and the digests of what they were made of.

As bytes it is JSON, a few dozen kilobytes for a host; the gradient that it stands for is not moved,
and the time that it would take on a line is waited instead (`bench.cluster.emulated_exchange`).
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from bench.cluster.blobs import Origin
from bench.cluster.ledger import Entry, Ledger
from services.scheduler.costs.shape import Shape
from shared.errors import ContractError


@dataclass(frozen=True, slots=True)
class PieceEntries:
    """Some samples, and a range of their trained steps."""

    steps: range
    entries: tuple[Entry, ...]


@dataclass(slots=True)
class Account:
    """What one member has summed."""

    pieces: list[PieceEntries] = field(default_factory=list)
    skipped_rows: int = 0
    """(sample, step) pairs without a gradient."""

    def plain(self) -> dict[str, Any]:
        """Return it as JSON takes it."""
        pieces = [
            [each.steps.start, each.steps.stop, [[*e.origin, e.digest.hex()] for e in each.entries]]
            for each in self.pieces
        ]
        return {"pieces": pieces, "skipped": self.skipped_rows}


def account_of(plain: Mapping[str, Any]) -> Account:
    """Read what `Account.plain` gives; raise ContractError if it is none."""
    try:
        pieces = [
            PieceEntries(
                range(first, end),
                tuple(Entry(Origin(*origin), bytes.fromhex(digest)) for *origin, digest in entries),
            )
            for first, end, entries in plain["pieces"]
        ]
        return Account(pieces, int(plain["skipped"]))
    except (KeyError, TypeError, ValueError) as error:
        raise ContractError(f"this is no account of a sum: {error}") from error


@dataclass(frozen=True, slots=True)
class Total:
    """The sums of all members, and the weights to which a step by them leads."""

    before: str
    after: str

    @property
    def sum_id(self) -> str:
        return hashlib.sha256(f"total/{self.before}/{self.after}".encode()).hexdigest()


def total_of(accounts: Mapping[str, Account], shape: Shape, batch: int, before: str) -> Total:
    """Add up what all members have summed.

    Args:
        before: digest of the weights at which it was summed.

    Raises:
        RuntimeError: if it is not every trained step of every sample of the batch exactly once.
    """
    ledger = Ledger(shape.group_size, shape.trained_steps)
    skipped = sum(account.skipped_rows for account in accounts.values())
    ledger.num_skipped = skipped // shape.trained_steps
    for account in accounts.values():
        for piece in account.pieces:
            ledger.take(piece.entries, piece.steps)
    return Total(before, ledger.close(batch, shape.samples, before))


def packed(round_name: str, accounts: Mapping[str, Account]) -> bytes:
    """Write what members of one host bring to a round."""
    sums = {address: account.plain() for address, account in accounts.items()}
    return json.dumps({"round": round_name, "sums": sums}).encode()


def unpacked(data: bytes) -> tuple[str, dict[str, Account]]:
    """Read what `packed` gives: the name of the round, and accounts by address."""
    plain = json.loads(data)
    return plain["round"], {who: account_of(each) for who, each in plain["sums"].items()}
