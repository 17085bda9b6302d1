"""Judges a simulated run by its history: by what was stored, done and committed, and not by what
the scheduler believed. Every check gives a line per violation.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from services.scheduler.core.state import Plan
from services.scheduler.sim.commits import Commit, trained_digest
from services.scheduler.sim.history import History
from services.scheduler.sim.history_events import Begun, Computed, Interval, Stepped
from shared.messages.contracts import (
    FragmentFailed,
    FragmentGenerated,
    FragmentScored,
    FragmentSlot,
    GenerateFragment,
    GroupFailed,
    GroupGradientRef,
    GroupTrained,
    Policy,
    PolicyPublished,
    SetDevice,
    TrainGroup,
)
from tests.faults.evidence import Evidence, Transaction, gather

Group = tuple[int, int]
"""Batch, index."""


def violations(plan: Plan, history: History, commits: Sequence[Commit]) -> list[str]:
    evidence = gather(plan, history, commits)
    return [line for check in CHECKS for line in check(evidence)]


def issued(evidence: Evidence) -> Iterator[str]:
    """Tasks are no staler than allowed, versions never go back, and no group begins too early."""
    plan, newest = evidence.plan, 0
    early: dict[int, set[int]] = defaultdict(set)
    for task in evidence.tasks:
        batch, version = task.fragment.batch, task.policy.version
        if not 0 <= batch - version <= plan.schedule.staleness_limit or batch >= plan.num_batches:
            yield f"{_where(task)} was issued with version {version}"
        if version < newest:
            yield f"{_where(task)} was issued with version {version} after {newest} was"
        newest = max(newest, version)
        if batch > version:
            early[batch].add(task.fragment.group)
    for batch, groups in early.items():
        if len(groups) > plan.early_groups:
            yield f"batch {batch}: groups {sorted(groups)} were begun early"


def begun(evidence: Evidence) -> Iterator[str]:
    """Devices begin nothing too stale, and nothing that they know to be superseded."""
    for fact in evidence.begun.values():
        version = fact.task.policy.version
        if not 0 <= fact.task.fragment.batch - version <= evidence.plan.schedule.staleness_limit:
            yield f"{fact.device} began {_where(fact.task)} with version {version}"
        if fact.newest > version:
            yield f"{fact.device} began {_where(fact.task)} by {version}, and knew {fact.newest}"


def slots(evidence: Evidence) -> Iterator[str]:
    """A slot takes one message: whatever is sent twice is stored once."""
    # Facts of refusals are in the history too; a broken broker has accepted both.
    messages = Counter(f.subject for f in evidence.stored if f.accepted and ".evt." not in f.subject
                       and ".device." not in f.subject)  # fmt: skip
    yield from (f"{subject} was stored {n} times" for subject, n in messages.items() if n > 1)


def chain(evidence: Evidence) -> Iterator[str]:
    """One record per version, without a gap, each made of the weights before it; and nothing is
    announced that is not committed."""
    records = evidence.commits
    if [record.policy.version for record in records] != list(range(len(records))):
        yield f"versions {[record.policy.version for record in records]} are committed"
    for before, record in pairwise(records):
        if record.parent != trained_digest(before.policy.weights_digest):
            yield f"version {record.policy.version} is not made of the version before it"
    committed = [record.policy for record in records]
    for fact in evidence.stored:
        if isinstance(fact.message, PolicyPublished) and fact.message.policy not in committed:
            yield f"{fact.message.worker} announces {fact.message.policy}, which is not committed"


def samples(evidence: Evidence) -> Iterator[str]:
    """Every sample of every batch is in its record, once."""
    plan = evidence.plan
    everything = [(g, s) for g in range(plan.num_groups) for s in range(plan.group_size)]
    for record in evidence.commits[1:]:
        batch = record.policy.version - 1
        found = [(group.group, sample) for group in record.trained
                 for part in group.fragments for sample in part.fragment.samples]  # fmt: skip
        if sorted(found) != everything:
            yield f"version {batch + 1} is trained on samples {sorted(found)}"
        for group in record.trained:
            if {group.batch, *(part.fragment.batch for part in group.fragments)} != {batch}:
                yield f"version {batch + 1} is trained on group {_group(group)}"
            staleness = batch - group.policy.version
            if not 0 <= staleness <= plan.schedule.staleness_limit:
                yield f"group {_group(group)} is trained {staleness} versions late"


def versions(evidence: Evidence) -> Iterator[str]:
    """One version per group; what is committed was generated by that version's very weights."""
    for group in evidence.groups:
        if any(part.policy != group.policy for part in group.fragments):
            yield f"group {_group(group)} is made of several versions"
    for record in evidence.commits[1:]:
        for group in record.trained:
            committed = evidence.commits[group.policy.version].policy
            if group.policy != committed:
                yield f"group {_group(group)} names weights that are not version's"
            for part in group.fragments:
                yield from _generated_as_said(evidence, group, part)


def _generated_as_said(
    evidence: Evidence, group: TrainGroup, part: FragmentScored
) -> Iterator[str]:
    origin = _origin(evidence, part)
    if origin.task.fragment != part.fragment or origin.device != part.generated_by:
        yield f"{_where(part)} is not what {origin.device} has generated"
    if origin.weights != group.policy.weights_digest or part.policy != group.policy:
        yield f"{_where(part)} was generated by other weights than it says"
    if len(part.rewards) != part.fragment.num_samples:
        yield f"{_where(part)} has {len(part.rewards)} rewards"


def trajectories(evidence: Evidence) -> Iterator[str]:
    """One version per trajectory, however often its device was called back in between."""
    for result in evidence.results:
        origin = _origin(evidence, result)
        used = {origin.weights, *(step.weights for step in evidence.steps[origin.generation])}
        if used != {result.stored.weights_digest}:
            yield f"{_where(result)} was generated by {len(used)} versions, or not by what it says"


def gradients(evidence: Evidence) -> Iterator[str]:
    """A step adds up every sample's gradient once, trained here or contributed; its record names
    exactly those."""
    plan = evidence.plan
    once = Counter((g, s) for g in range(plan.num_groups) for s in range(plan.group_size))
    for transaction in evidence.transactions:
        device, batch = transaction.asked.device, transaction.asked.version - 1
        added = Counter(_samples(plan, transaction))
        if added != once:
            wrong = sorted(set((added - once) + (once - added)))
            yield f"{device} added up {wrong} of batch {batch} twice or not at all"
        if transaction.asked.accepted:
            yield from _named_as_added(evidence, transaction)


def _samples(plan: Plan, transaction: Transaction) -> Iterator[tuple[int, int]]:
    for fact in transaction.added:
        for sample in fact.samples or range(plan.group_size):
            yield fact.group.group, sample


def _named_as_added(evidence: Evidence, transaction: Transaction) -> Iterator[str]:
    version = transaction.asked.version
    record = evidence.commits[version]
    named = {(group.group, group.attempt, _source(group)) for group in record.trained}
    added = {
        (fact.group.group, fact.group.attempt, "" if fact.samples else _source(fact.group))
        for fact in transaction.added
    }
    if record.worker == transaction.asked.device and named != added:
        yield f"version {version} names {sorted(named)}, and {sorted(added)} was added up"


def _source(group: TrainGroup) -> str:
    return "" if group.contribution is None else group.contribution.gradient.key


def contributions(evidence: Evidence) -> Iterator[str]:
    """A contribution is the gradient at the batch's own weights, of exactly the fragments that the
    record names."""
    for command in evidence.asked:
        if command.policy.version != command.group.batch:
            yield f"the gradient of {_group(command.group)} was asked for at {command.policy}"
    for record in evidence.commits[1:]:
        policy = evidence.commits[record.policy.version - 1].policy
        for group in record.trained:
            if group.contribution is not None:
                origin = evidence.computed[_number(group.contribution.gradient.key)]
                yield from _computed_as_said(origin, group, group.contribution, policy)


def _computed_as_said(
    origin: Computed, group: TrainGroup, contribution: GroupGradientRef, policy: Policy
) -> Iterator[str]:
    if origin.device != contribution.worker:
        yield f"{_group(group)} names a gradient of {origin.device}'s as another's"
    at_trained = origin.weights == trained_digest(policy.weights_digest)
    if not at_trained or origin.command.policy != policy:
        yield f"{_group(group)} was added as computed at other weights than {policy}"
    if _trajectories(origin.command.group) != _trajectories(group):
        yield f"{_group(group)} was added as computed from other fragments"


def _trajectories(group: TrainGroup) -> list[str]:
    where = f"{group.batch}/{group.group} {group.advantages}"
    return [where, *(part.stored.trajectory.key for part in group.fragments)]


def one_use_at_a_time(evidence: Evidence) -> Iterator[str]:
    """A device never trains and generates at once, and makes one fragment at a time; the devices
    of a trainer that go together count as one."""
    by_device: dict[str, list[Interval]] = defaultdict(list)
    for interval in evidence.intervals:
        by_device[interval.device].append(interval)
    for device, intervals in by_device.items():
        for before, after in pairwise(sorted(intervals, key=lambda i: (i.begin, i.end))):
            if after.begin < before.end - 1e-9:
                yield f"{device}: {after.use} at {after.begin:.3f} during {before.use}"


def loans(evidence: Evidence) -> Iterator[str]:
    """A step begins only under the highest loan that the device was told, before its deadline."""
    for device, facts in evidence.loans.items():
        highest, deadline = 0, 0.0
        for fact in facts:
            if isinstance(fact, Stepped):
                if fact.time >= deadline:
                    yield f"{device} took a step at {fact.time:.3f} without a loan ({highest})"
            elif fact.command.loan_number > highest:
                highest = fact.command.loan_number
                lent = fact.command.mode == "generate"
                deadline = fact.time + fact.command.max_seconds if lent else 0.0


def lending(evidence: Evidence) -> Iterator[str]:
    """No device is borrowed while it has a group that, by all reports, it has not trained: ready
    training goes first, except for independent devices."""
    seen = Sent()
    for fact in evidence.stored:
        match fact.message:
            case GenerateFragment(policy=policy):
                seen.newest = max(seen.newest, policy.version)
            case TrainGroup() as group if fact.accepted:
                seen.send(group)
            case SetDevice(mode="generate", worker=worker, loan_number=number):
                if seen.newest != _newest(evidence, fact.time):
                    continue  # the scheduler may not know yet which batch is being trained
                late = seen.untrained_by(worker) if _goes_first(evidence, worker) else []
                if _may_train(evidence.plan, late, seen.waiting):
                    yield f"loan {number} of {worker}, while {late} wait to be trained"
            case GroupFailed() | FragmentFailed() | GroupTrained() as event:
                seen.hear(event)


def _goes_first(evidence: Evidence, trainer: str) -> bool:
    """Whether ready training goes first on this trainer."""
    colocated = evidence.plan.schedule.mode == "colocated"
    return not colocated and trainer not in evidence.independent_devices


@dataclass(slots=True)
class Sent:
    """Groups that the scheduler has sent to the trainer, and what was said of them."""

    newest: int = 0
    """Version for which something was issued: the batch that is being trained, or one before."""
    waiting: dict[Group, TrainGroup] = field(default_factory=dict)
    trained: set[tuple[str, Group]] = field(default_factory=set)
    failed: set[str] = field(default_factory=set)

    def send(self, group: TrainGroup) -> None:
        if not any(_place(part.fragment) in self.failed for part in group.fragments):
            self.waiting[group.batch, group.group] = group

    def hear(self, event: GroupFailed | FragmentFailed | GroupTrained) -> None:
        match event:
            case GroupTrained(batch=batch, group=group, worker=worker):
                self.trained.add((worker, (batch, group)))
            case GroupFailed(batch=batch, group=group):
                self.waiting.pop((batch, group), None)
            case FragmentFailed(slot=slot):
                self.waiting.pop((slot.batch, slot.group), None)
                self.failed.add(_place(slot))

    def untrained_by(self, trainer: str) -> list[Group]:
        """Groups of the newest batch that this trainer has not trained."""
        return [g for g in self.waiting if g[0] == self.newest and (trainer, g) not in self.trained]


def _newest(evidence: Evidence, time: float) -> int:
    asked = [transaction.asked for transaction in evidence.transactions]
    return max((f.version for f in asked if f.accepted and f.time <= time), default=0)


def _may_train(plan: Plan, late: list[Group], sent: dict[Group, TrainGroup]) -> bool:
    if not plan.schedule.deterministic or not late:
        return bool(late)
    batch, first = min(late)
    return all((batch, group) in sent for group in range(first))


def _origin(evidence: Evidence, result: FragmentGenerated | FragmentScored) -> Begun:
    """The generation whose trajectory a result names."""
    return evidence.begun[_number(result.stored.trajectory.key)]


def _number(key: str) -> int:
    return int(key.rpartition("/")[2])


def _where(work: GenerateFragment | FragmentGenerated | FragmentScored) -> str:
    return f"fragment {_place(work.fragment)}"


def _place(slot: FragmentSlot) -> str:
    return f"{slot.batch}.{slot.group}.{slot.first_sample}.{slot.attempt}"


def _group(group: TrainGroup) -> str:
    return f"{group.batch}/{group.group}, attempt {group.attempt},"


CHECKS: tuple[Callable[[Evidence], Iterator[str]], ...] = (
    issued, begun, slots, chain, samples, versions, trajectories, gradients, contributions,
    one_use_at_a_time, loans, lending,
)  # fmt: skip
