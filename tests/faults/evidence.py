"""What a simulated run left behind, sorted for the checks."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from services.scheduler.core.state import Plan
from services.scheduler.sim.commits import Commit
from services.scheduler.sim.history import History
from services.scheduler.sim.history_events import (
    Added,
    Begun,
    Committed,
    Computed,
    Fact,
    Interval,
    Opened,
    Stepped,
    Stored,
    Told,
)
from shared.messages.contracts import (
    ComputeGradient,
    FragmentGenerated,
    GenerateFragment,
    TrainGroup,
)


class Transaction(NamedTuple):
    """A commit that was asked for, and what had been added up for it."""

    asked: Committed
    added: Sequence[Added]


@dataclass(slots=True)
class Evidence:
    plan: Plan
    commits: Sequence[Commit]
    intervals: Sequence[Interval]
    stored: list[Stored] = field(default_factory=list)
    tasks: list[GenerateFragment] = field(default_factory=list)
    """Tasks that were stored, in order."""
    results: list[FragmentGenerated] = field(default_factory=list)
    groups: list[TrainGroup] = field(default_factory=list)
    asked: list[ComputeGradient] = field(default_factory=list)
    begun: dict[int, Begun] = field(default_factory=dict)
    """Beginnings by the number of the generation."""
    steps: dict[int, list[Stepped]] = field(default_factory=lambda: defaultdict(list))
    """Denoising steps by the number of the generation."""
    computed: dict[int, Computed] = field(default_factory=dict)
    """Gradients by number."""
    loans: dict[str, list[Told | Stepped]] = field(default_factory=lambda: defaultdict(list))
    """Loan commands and steps, by device."""
    transactions: list[Transaction] = field(default_factory=list)
    independent_devices: set[str] = field(default_factory=set)
    """Trainers each of whose devices works on its own."""
    _added: dict[tuple[str, int], list[Added]] = field(default_factory=dict)
    """Gradients added since the batch was last begun, by trainer and batch."""


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
        case Computed():
            evidence.computed[fact.number] = fact
        case Stepped():
            evidence.loans[fact.device].append(fact)
            for generation in fact.generations:
                evidence.steps[generation].append(fact)
        case Told():
            evidence.loans[fact.device].append(fact)
        case Opened() | Added() | Committed():
            _file_training(evidence, fact)


def _file_training(evidence: Evidence, fact: Opened | Added | Committed) -> None:
    match fact:
        case Opened(device=device, version=version, alone=alone):
            evidence._added[device, version] = []
            if alone:
                evidence.independent_devices.add(device)
        case Added(device=device, group=group):
            evidence._added.setdefault((device, group.batch), []).append(fact)
        case Committed(device=device, version=version):
            added = evidence._added.get((device, version - 1), [])
            evidence.transactions.append(Transaction(fact, tuple(added)))


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
        case ComputeGradient() as command:
            evidence.asked.append(command)
