"""Judges a simulated run by its history: by what was stored, done and committed, and not by what
the scheduler believed. Every check gives a line per violation.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from services.scheduler.sim.commits import Commit
from services.scheduler.sim.history import (
    Begun,
    Committed,
    Fact,
    History,
    Interval,
    Stepped,
    Stored,
    Told,
    Trained,
)
from services.scheduler.state import Plan
from shared.contracts import (
    FragmentFailed,
    FragmentGenerated,
    FragmentScored,
    FragmentSlot,
    GenerateFragment,
    GroupFailed,
    GroupTrained,
    SetDevice,
    TrainGroup,
)

Group = tuple[int, int]
"""Batch, index."""


@dataclass(slots=True)
class Evidence:
    plan: Plan
    commits: Sequence[Commit]
    intervals: Sequence[Interval]
    stored: list[Stored] = field(default_factory=list)
    tasks: list[GenerateFragment] = field(default_factory=list)
    """That were stored, in order."""
    results: list[FragmentGenerated] = field(default_factory=list)
    groups: list[TrainGroup] = field(default_factory=list)
    begun: dict[int, Begun] = field(default_factory=dict)
    """By generation."""
    steps: dict[int, list[Stepped]] = field(default_factory=lambda: defaultdict(list))
    """By generation."""
    loans: dict[str, list[Told | Stepped]] = field(default_factory=lambda: defaultdict(list))
    """By device."""
    trained: dict[tuple[str, int], list[TrainGroup]] = field(
        default_factory=lambda: defaultdict(list)
    )
    """By trainer's address and batch."""
    committed: list[Committed] = field(default_factory=list)


def violations(plan: Plan, history: History, commits: Sequence[Commit]) -> list[str]:
    evidence = Evidence(plan, commits, history.intervals)
    for fact in history.facts:
        _file(evidence, fact)
    return [line for check in CHECKS for line in check(evidence)]


def _file(evidence: Evidence, fact: Fact) -> None:
    match fact:
        case Stored():
            evidence.stored.append(fact)
            _file_message(evidence, fact)
        case Begun():
            evidence.begun[fact.generation] = fact
        case Stepped():
            evidence.loans[fact.device].append(fact)
            for generation in fact.generations:
                evidence.steps[generation].append(fact)
        case Told():
            evidence.loans[fact.device].append(fact)
        case Trained(device=device, group=group):
            evidence.trained[device, group.batch].append(group)
        case Committed():
            evidence.committed.append(fact)


def _file_message(evidence: Evidence, fact: Stored) -> None:
    if not fact.accepted:
        return
    match fact.message:
        case GenerateFragment() as task:
            evidence.tasks.append(task)
        case FragmentGenerated() as result:
            evidence.results.append(result)
        case TrainGroup() as group:
            evidence.groups.append(group)


def issued(evidence: Evidence) -> Iterator[str]:
    """Tasks: stale by no more than allowed, versions never go back, no group begun too early."""
    plan, newest = evidence.plan, 0
    early: dict[int, set[int]] = defaultdict(set)
    for task in evidence.tasks:
        batch, version = task.fragment.batch, task.policy.version
        if not 0 <= batch - version <= plan.max_staleness or batch >= plan.num_batches:
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
    """Devices begin nothing that is too stale, and nothing superseded that they know of."""
    for fact in evidence.begun.values():
        version = fact.task.policy.version
        if not 0 <= fact.task.fragment.batch - version <= evidence.plan.max_staleness:
            yield f"{fact.device} began {_where(fact.task)} with version {version}"
        if fact.newest > version:
            yield f"{fact.device} began {_where(fact.task)} by {version}, and knew {fact.newest}"


def slots(evidence: Evidence) -> Iterator[str]:
    """A slot takes one message: whatever is sent twice is there once."""
    # Facts of refusals are in the history too; a broken broker has accepted both.
    messages = Counter(f.subject for f in evidence.stored if f.accepted and ".evt." not in f.subject
                       and ".device." not in f.subject)  # fmt: skip
    yield from (f"{subject} was stored {n} times" for subject, n in messages.items() if n > 1)


def chain(evidence: Evidence) -> Iterator[str]:
    """One record per version, without a gap, each made of the weights before it."""
    records = evidence.commits
    if [record.policy.version for record in records] != list(range(len(records))):
        yield f"versions {[record.policy.version for record in records]} are committed"
    for before, record in pairwise(records):
        if record.parent != before.policy.weights_digest:
            yield f"version {record.policy.version} is not made of the version before it"


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
            if not 0 <= staleness <= plan.max_staleness:
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
    """A record names exactly what its trainer has added up, each group once."""
    for fact in evidence.committed:
        added = evidence.trained[fact.device, fact.version - 1]
        groups = [group.group for group in added]
        if len(set(groups)) < len(groups):
            yield f"{fact.device} trained groups {groups} of batch {fact.version - 1}"
    for record in evidence.commits[1:]:
        added = evidence.trained[record.worker, record.policy.version - 1]
        key = [(group.group, group.attempt) for group in record.trained]
        if sorted(key) != sorted((group.group, group.attempt) for group in added):
            yield f"version {record.policy.version} names {key}, and something else was added up"


def one_use_at_a_time(evidence: Evidence) -> Iterator[str]:
    """A trainer's device does not train and generate at once; others make one fragment at a time."""
    by_device: dict[str, list[Interval]] = defaultdict(list)
    for interval in evidence.intervals:
        by_device[interval.device].append(interval)
    for device, intervals in by_device.items():
        for before, after in pairwise(sorted(intervals, key=lambda i: (i.begin, i.end))):
            if after.begin < before.end - 1e-9:
                yield f"{device}: {after.use} at {after.begin:.3f} during {before.use}"


def loans(evidence: Evidence) -> Iterator[str]:
    """No step begins but under the highest loan that the device was told, before its deadline."""
    for device, facts in evidence.loans.items():
        highest, deadline = 0, 0.0
        for fact in facts:
            if isinstance(fact, Stepped):
                if fact.time >= deadline:
                    yield f"{device} took a step at {fact.time:.3f} without a loan ({highest})"
            elif fact.command.generation > highest:
                highest = fact.command.generation
                lent = fact.command.mode == "generate"
                deadline = fact.time + fact.command.max_seconds if lent else 0.0


def lending(evidence: Evidence) -> Iterator[str]:
    """No device is borrowed while a group is with it that, as far as anybody has said, it has not
    trained: ready training goes first."""
    waiting: dict[Group, TrainGroup] = {}
    trained: set[tuple[str, Group]] = set()
    failed: set[str] = set()
    issued = 0
    for fact in evidence.stored:
        match fact.message:
            case GenerateFragment(policy=policy):
                issued = max(issued, policy.version)
            case TrainGroup(batch=batch, group=group) as sent if fact.accepted:
                if not any(_place(part.fragment) in failed for part in sent.fragments):
                    waiting[batch, group] = sent
            case GroupFailed(batch=batch, group=group):
                waiting.pop((batch, group), None)
            case FragmentFailed(slot=slot):
                waiting.pop((slot.batch, slot.group), None)
                failed.add(_place(slot))
            case GroupTrained(batch=batch, group=group, worker=worker):
                trained.add((worker, (batch, group)))
            case SetDevice(mode="generate", worker=worker, generation=generation):
                if issued != _newest(evidence, fact.time):
                    continue  # it may not know yet which batch is being trained
                late = [g for g in waiting if g[0] == issued and (worker, g) not in trained]
                if _may_train(evidence.plan, issued, late, waiting):
                    yield f"loan {generation} of {worker}, while {late} wait to be trained"


def _newest(evidence: Evidence, time: float) -> int:
    return max((f.version for f in evidence.committed if f.accepted and f.time <= time), default=0)


def _may_train(plan: Plan, batch: int, late: list[Group], sent: dict[Group, TrainGroup]) -> bool:
    if not plan.trains_in_order:
        return bool(late)
    before = [(batch, group) for group in range(min((g for _, g in late), default=0))]
    return bool(late) and all(group in sent for group in before)


def _origin(evidence: Evidence, result: FragmentGenerated | FragmentScored) -> Begun:
    """The generation whose trajectory a result names."""
    return evidence.begun[int(result.stored.trajectory.key.rpartition("/")[2])]


def _where(work: GenerateFragment | FragmentGenerated | FragmentScored) -> str:
    return f"fragment {_place(work.fragment)}"


def _place(slot: FragmentSlot) -> str:
    return f"{slot.batch}.{slot.group}.{slot.first_sample}.{slot.attempt}"


def _group(group: TrainGroup) -> str:
    return f"{group.batch}/{group.group}, attempt {group.attempt},"


CHECKS: tuple[Callable[[Evidence], Iterator[str]], ...] = (
    issued, begun, slots, chain, samples, versions, trajectories, gradients, one_use_at_a_time,
    loans, lending,
)  # fmt: skip
