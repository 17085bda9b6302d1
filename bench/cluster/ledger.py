"""Ledger of the samples in a batch's gradient, which emulated members keep.

The digest of the weights after a batch follows from the digest before it and from this ledger:
from each sample's seed, its advantage, and the digest of its bytes as they were read, in index
order. So two runs that end with the same digest have trained the same samples, with the same
rewards, once each, whoever generated and trained them and in whatever order.

A group without any advantage counts as one that was skipped. With one-step asynchrony the version
that generates a group depends on timing, and so do the digests: they are comparable at a staleness
of 0 only.
"""

import hashlib
import struct
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from bench.cluster.blobs import Origin, read_origin
from shared.devices.protocols import GroupData
from shared.errors import ContractError

SKIPPED = bytes(32)
"""Stands for the digest of what has no gradient."""


class GroupEntry(NamedTuple):
    """A whole group that was trained: the digest is of its samples."""

    batch: int
    group: int
    digest: bytes


class Entry(NamedTuple):
    """A sample that is trained, with its seed, advantage and bytes as a digest."""

    origin: Origin
    digest: bytes


def entries_of(group: GroupData, samples: range, start: int = 0) -> list[Entry]:
    """Makes the entries of some samples of a group, from the bytes of its trajectories, of which
    the last ``start`` of each fragment are those that its samples have in common.

    Raises:
        ContractError: if the bytes are no emulated trajectories of so many samples.
    """
    rows = _rows(group, start)
    has_gradient = any(group.advantages)
    entries = []
    for sample in samples:
        advantage = struct.pack(">d", group.advantages[sample])
        origin = read_origin(rows[sample])
        read = hashlib.sha256(rows[sample]).digest()
        digest = hashlib.sha256(_number(origin.seed) + advantage + read).digest()
        entries.append(Entry(origin, digest if has_gradient else SKIPPED))
    return entries


def group_entry(entries: Sequence[Entry]) -> GroupEntry:
    """Joins the entries of a group in the order of its samples.

    Raises:
        ContractError: if they are not those of one group, each once.
    """
    origins = [entry.origin for entry in entries]
    wanted = [(origins[0].batch, origins[0].group, sample) for sample in range(len(origins))]
    if [(each.batch, each.group, each.sample) for each in origins] != wanted:
        raise ContractError(f"these are not the samples of one group: {origins}")
    digests = [entry.digest for entry in entries]
    is_skipped = SKIPPED in digests
    digest = SKIPPED if is_skipped else hashlib.sha256(b"".join(digests)).digest()
    return GroupEntry(origins[0].batch, origins[0].group, digest)


@dataclass(slots=True)
class Ledger:
    """Keeps the account of one batch; nothing is refused before it is closed, as in a gradient."""

    group_size: int
    trained_steps: int
    num_skipped: int = 0
    _taken: defaultdict[tuple[int, int, int], list[tuple[int, Entry]]] = field(
        default_factory=lambda: defaultdict(list)
    )
    """(batch, group, sample) -> (trained step, entry), of each that was taken."""

    def take(self, entries: Sequence[Entry], steps: range) -> None:
        """Notes some steps of some samples as trained."""
        for entry in entries:
            self._taken[entry.origin[:3]].extend((step, entry) for step in steps)

    def close(self, batch: int, num_samples: int, before: str) -> str:
        """Returns the digest of the weights after the batch, which was trained from ``before``.

        Raises:
            RuntimeError: if not every sample of the batch is in it exactly once.
        """
        groups = sorted(self._groups(batch), key=lambda entry: entry.group)
        strange = [entry for entry in groups if entry.batch != batch]
        if strange:
            raise RuntimeError(f"batch {batch}: groups of other batches {strange}")
        trained = [entry for entry in groups if entry.digest != SKIPPED]
        num_skipped = self.num_skipped + self.group_size * (len(groups) - len(trained))
        found = self.group_size * len(trained) + num_skipped
        if found != num_samples:
            raise RuntimeError(f"batch {batch} has {found} samples in its gradient")
        chain = hashlib.sha256(f"{before}/{batch}/{num_skipped}".encode())
        for entry in trained:
            chain.update(_number(entry.group) + entry.digest)
        return chain.hexdigest()

    def _groups(self, batch: int) -> Iterator[GroupEntry]:
        groups: defaultdict[tuple[int, int], list[Entry]] = defaultdict(list)
        for (of_batch, group, _), parts in sorted(self._taken.items()):
            steps, entries = sorted(step for step, _ in parts), {entry for _, entry in parts}
            if steps != list(range(self.trained_steps)) or len(entries) > 1:
                raise RuntimeError(f"batch {batch}: the steps {steps} of {entries}")
            groups[of_batch, group].extend(entries)
        for (_, group), samples in groups.items():
            if len(samples) != self.group_size:
                raise RuntimeError(f"batch {batch}: {len(samples)} samples of group {group}")
            yield group_entry(samples)


def _rows(group: GroupData, start: int) -> list[memoryview]:
    """Returns the bytes of each sample; all are as long as one another."""
    views = [memoryview(data)[: len(data) - start] for data in group.trajectories]
    total, number = sum(map(len, views)), len(group.advantages)
    size, rest = divmod(total, number)
    if rest or not size or any(len(view) % size for view in views):
        raise ContractError(f"{total} bytes are not the trajectories of {number} samples")
    return [view[at : at + size] for view in views for at in range(0, len(view), size)]


def _number(value: int) -> bytes:
    return value.to_bytes(8, "big")
