"""What a history has met: every kind of fault, and every branch that is hard to reach."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from services.scheduler.sim.commits import Commit
from services.scheduler.sim.history import (
    Begun,
    Committed,
    Expired,
    Fact,
    Fault,
    History,
    Stepped,
    Stored,
    Told,
)
from shared.contracts import (
    FragmentFailed,
    FragmentGenerated,
    FragmentReleased,
    FragmentScored,
    GenerateFragment,
    SetDevice,
    TrainGroup,
)

BRANCHES = (
    "released: stale", "released: draining", "early group kept", "early group begun anew",
    "lent", "helped", "called back, kept", "called back, dropped", "resumed after return",
    "loan expired", "zombie commit refused", "second result refused", "second score refused",
    "second task refused", "given to another device", "failed: reward",
    "failed: admission", "group sent again", "slot poisoned", "restart with work in hand",
    "announced during recovery", "lease ended", "run resumed after failure",
)  # fmt: skip
REFUSED = {
    FragmentGenerated: "second result refused",
    FragmentScored: "second score refused",
    GenerateFragment: "second task refused",
}


@dataclass(slots=True)
class Meter:
    counts: Counter[str] = field(default_factory=Counter)
    holders: dict[str, str] = field(default_factory=dict)
    """Fragment slot -> device that it was given to last."""
    outstanding: set[str] = field(default_factory=set)
    """Fragment slots that were issued and have no result."""
    versions: dict[tuple[int, int], int] = field(default_factory=dict)
    """Group -> version that it was last begun with."""
    unfinished: dict[str, set[int]] = field(default_factory=dict)
    """Device -> generations that it was called back from."""


def coverage(history: History, commits: Sequence[Commit]) -> Counter[str]:
    meter = Meter()
    for fact in history.facts:
        _count(meter, fact)
    for commit in commits:
        for group in commit.trained:
            meter.counts["early group kept"] += group.policy.version < group.batch
    return +meter.counts


def _count(meter: Meter, fact: Fact) -> None:
    match fact:
        case Stored():
            _count_message(meter, fact)
        case Fault(what=what):
            meter.counts[what] += 1
            if what == "scheduler restarts" and meter.outstanding:
                meter.counts["restart with work in hand"] += 1
        case Expired():
            meter.counts["loan expired"] += 1
        case Committed(accepted=False):
            meter.counts["zombie commit refused"] += 1
        case Begun() | Stepped() | Told():
            _count_loan(meter, fact)


def _count_loan(meter: Meter, fact: Begun | Stepped | Told) -> None:
    """Generations that go on after the device was called back from them."""
    called_back = meter.unfinished.setdefault(fact.device, set())
    match fact:
        case Stepped(generations=generations):
            resumed = called_back.intersection(generations)
            meter.counts["resumed after return"] += len(resumed)
            called_back -= resumed
            meter.unfinished[f"{fact.device} now"] = set(generations)
        case Told(command=SetDevice(mode="train", keep=True)):
            called_back |= meter.unfinished.get(f"{fact.device} now", set())


def _count_message(meter: Meter, fact: Stored) -> None:
    message, counts = fact.message, meter.counts
    if not fact.accepted:
        counts[REFUSED.get(type(message), "")] += 1
        return
    match message:
        case GenerateFragment():
            _count_task(meter, message)
        case FragmentGenerated(worker=worker):
            meter.outstanding.discard(_place(message))
            counts["helped"] += worker.startswith("trainer")
        case FragmentReleased(reason=reason):
            counts[f"released: {reason}"] += 1
        case FragmentFailed(stage=stage):
            counts[f"failed: {stage}"] += 1
        case TrainGroup(attempt=attempt):
            counts["group sent again"] += attempt > 0
        case SetDevice(mode=mode, keep=keep):
            counts["lent" if mode == "generate" else "called back, kept" if keep
                   else "called back, dropped"] += 1  # fmt: skip


def _count_task(meter: Meter, task: GenerateFragment) -> None:
    slot = task.fragment
    place, group = _place(task), (slot.batch, slot.group)
    meter.counts["given to another device"] += meter.holders.get(place, task.worker) != task.worker
    meter.holders[place] = task.worker
    meter.outstanding.add(place)
    version = meter.versions.get(group, task.policy.version)
    meter.counts["early group begun anew"] += version < task.policy.version
    meter.versions[group] = task.policy.version


def _place(work: GenerateFragment | FragmentGenerated) -> str:
    slot = work.fragment
    return f"{slot.batch}.{slot.group}.{slot.first_sample}.{slot.attempt}"
