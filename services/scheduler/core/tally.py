"""Counts what every event asks of all groups of a batch, and follows them one group at a time."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, Protocol

from shared.messages.records import Policy

Stage = Literal["pending", "issued", "generated", "scored"]


class _Fragment(Protocol):
    @property
    def stage(self) -> Stage: ...
    @property
    def num_samples(self) -> int: ...


class _Group(Protocol):
    @property
    def fragments(self) -> Sequence[_Fragment]: ...
    @property
    def num_cut(self) -> int: ...
    @property
    def num_scored(self) -> int: ...
    @property
    def sent(self) -> bool: ...
    @property
    def policy(self) -> Policy | None: ...


@dataclass(frozen=True, slots=True)
class Tally:
    stages: Mapping[Stage, int] = field(default_factory=dict)
    """Number of fragments at each stage."""
    cut: int = 0
    """Samples that belong to a fragment."""
    pending: int = 0
    """Samples in fragments that wait for a device."""
    scored: int = 0
    """Samples with a score."""
    end: int = 0
    """No group from this one on has been cut."""
    first: int = 0
    """No group before this one has anything to issue."""
    maybe_whole: frozenset[int] = frozenset()
    """Groups that are not sent and all of whose fragments are scored."""
    sent: int = 0
    """Groups that were sent to be trained."""
    policies: Mapping[Policy, int] = field(default_factory=dict)
    """Number of groups that each version generates."""

    def changed(self, index: int, old: _Group, new: _Group) -> "Tally":
        """The counts after a group was replaced by another state of it."""
        stages, pending, first = dict(self.stages), self.pending, self.first
        for fragment in old.fragments:
            stages[fragment.stage] -= 1
            if fragment.stage == "pending":
                pending -= fragment.num_samples
        for fragment in new.fragments:
            stages[fragment.stage] = stages.get(fragment.stage, 0) + 1
            if fragment.stage == "pending":
                pending += fragment.num_samples
                first = min(first, index)
        return Tally(
            stages=stages,
            cut=self.cut + new.num_cut - old.num_cut,
            pending=pending,
            scored=self.scored + new.num_scored - old.num_scored,
            end=max(self.end, index + 1) if new.num_cut else self.end,
            first=min(first, index) if new.num_cut < old.num_cut else first,
            maybe_whole=_followed(self.maybe_whole, index, new),
            sent=self.sent + new.sent - old.sent,
            policies=_policies(self.policies, old.policy, new.policy),
        )

    def from_group(self, first: int) -> "Tally":
        """The same, knowing that no group before ``first`` has anything to issue."""
        return self if first <= self.first else replace(self, first=first)


def count_groups(groups: Sequence[_Group], nothing: _Group) -> Tally:
    """The counts of these groups; ``nothing``: a group of which nothing was cut."""
    tally = Tally()
    for index, group in enumerate(groups):
        if group is not nothing:
            tally = tally.changed(index, nothing, group)
    return tally


def _followed(indices: frozenset[int], index: int, group: _Group) -> frozenset[int]:
    if not group.sent and 0 < group.num_cut == group.num_scored:
        return indices if index in indices else indices | {index}
    return indices - {index} if index in indices else indices


def _policies(
    counts: Mapping[Policy, int], old: Policy | None, new: Policy | None
) -> Mapping[Policy, int]:
    if old is new:
        return counts
    changed = dict(counts)
    if old is not None:
        changed[old] -= 1
    if new is not None:
        changed[new] = changed.get(new, 0) + 1
    return {policy: number for policy, number in changed.items() if number}
