"""What a simulated run left behind, sorted for the checks."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

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
from shared.contracts import FragmentGenerated, GenerateFragment, TrainGroup


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


def gather(plan: Plan, history: History, commits: Sequence[Commit]) -> Evidence:
    evidence = Evidence(plan, commits, history.intervals)
    for fact in history.facts:
        _file(evidence, fact)
    return evidence


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
