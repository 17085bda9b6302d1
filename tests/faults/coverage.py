"""What a history has met: every kind of fault, and every branch that is hard to reach."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from services.scheduler.sim.commits import Commit
from services.scheduler.sim.history import History
from services.scheduler.sim.history_events import (
    Added,
    Begun,
    Committed,
    Computed,
    Expired,
    Fact,
    Fault,
    Moved,
    Opened,
    Stepped,
    Stored,
    Summed,
    Taken,
    Told,
    Totalled,
)
from shared.messages.contracts import (
    ComputeGradient,
    FragmentFailed,
    FragmentGenerated,
    FragmentReleased,
    FragmentScored,
    GenerateFragment,
    GradientComputed,
    GradientReleased,
    Message,
    SetDevice,
    TrainGroup,
)

BRANCHES = (
    "released: stale", "released: draining", "early group kept", "early group begun again",
    "lent", "helped", "called back, kept", "called back, dropped", "resumed after return",
    "loan expired", "zombie commit refused", "second result refused", "second score refused",
    "second task refused", "given to another device", "failed: reward",
    "failed: admission", "group sent again", "slot poisoned", "restart with unfinished work",
    "announced during recovery", "lease ended", "run resumed after failure",
    "gradient released: stale", "gradient released: draining", "gradient released: failed",
    "second gradient refused", "gradient comes too late", "gradient lost, trained by the trainer",
    "died with a gradient", "gradient device killed",
    "gradient device hung", "gradient device drained",
    "group contributed", "stale group contributed",
    "name taken", "not asked: late", "not asked: leaves", "not asked: returns",
    "trained in slices", "trained beside publication", "batch begun again after a conflict",
)  # fmt: skip
REFUSED = {
    FragmentGenerated: "second result refused",
    FragmentScored: "second score refused",
    GenerateFragment: "second task refused",
    GradientComputed: "second gradient refused",
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
    asked: dict[tuple[int, int], int] = field(default_factory=dict)
    """Group -> attempt whose gradient a rollout device was given last."""
    sent: dict[tuple[int, int], int] = field(default_factory=dict)
    """Group -> attempt that the trainer was sent last."""
    opened: set[tuple[str, int]] = field(default_factory=set)
    """Trainers and the batches that they have begun."""
    committed: set[int] = field(default_factory=set)
    """Committed versions."""


def coverage(history: History, commits: Sequence[Commit]) -> Counter[str]:
    meter = Meter()
    for fact in history.facts:
        _count(meter, fact)
    for commit in commits:
        for group in commit.trained:
            is_stale, is_computed = group.policy.version < group.batch, bool(group.contribution)
            meter.counts["early group kept"] += is_stale
            meter.counts["group contributed"] += is_computed
            meter.counts["stale group contributed"] += is_stale and is_computed
    return +meter.counts


def _count(meter: Meter, fact: Fact) -> None:
    match fact:
        case Stored():
            _count_message(meter, fact)
        case Summed() | Totalled() | Moved() | Taken():
            pass  # of fluid devices, which have a sweep of their own
        case Fault(what=what):
            meter.counts[what] += 1
            if what == "scheduler restarts" and meter.outstanding:
                meter.counts["restart with unfinished work"] += 1
        case Expired():
            meter.counts["loan expired"] += 1
        case Begun() | Stepped() | Told():
            _count_loan(meter, fact)
        case _:
            _count_training(meter, fact)


def _count_training(meter: Meter, fact: Committed | Opened | Added | Computed) -> None:
    match fact:
        case Committed(version=version, accepted=accepted):
            meter.counts["zombie commit refused"] += not accepted
            meter.committed.add(version)
        case Opened(device=device, version=version):
            again = (device, version) in meter.opened
            meter.counts["batch begun again after a conflict"] += again
            meter.opened.add((device, version))
        case Added(group=group, samples=samples):
            meter.counts["trained in slices"] += 0 < len(samples) < len(group.advantages)
            beside = group.batch and group.batch not in meter.committed
            meter.counts["trained beside publication"] += bool(beside)


def _count_loan(meter: Meter, fact: Begun | Stepped | Told) -> None:
    """Count generations that continue after the device was called back from them."""
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
        case SetDevice(mode=mode, keep=keep):
            counts["lent" if mode == "generate" else "called back, kept" if keep
                   else "called back, dropped"] += 1  # fmt: skip
        case _:
            _count_group(meter, message)


def _count_group(meter: Meter, message: Message) -> None:
    """Count who trains a group, and how."""
    match message:
        case ComputeGradient(group=group):
            meter.asked[group.batch, group.group] = group.attempt
        case TrainGroup() as group:
            meter.counts["group sent again"] += group.attempt > 0
            lost = (group.batch, group.group) in meter.asked and group.contribution is None
            meter.counts["gradient lost, trained by the trainer"] += lost
            meter.sent[group.batch, group.group] = group.attempt
        case GradientComputed(batch=batch, group=index, attempt=attempt):
            late = meter.sent.get((batch, index), -1) > attempt
            meter.counts["gradient comes too late"] += late
        case GradientReleased(reason=reason):
            meter.counts[f"gradient released: {reason}"] += 1


def _count_task(meter: Meter, task: GenerateFragment) -> None:
    slot = task.fragment
    place, group = _place(task), (slot.batch, slot.group)
    meter.counts["given to another device"] += meter.holders.get(place, task.worker) != task.worker
    meter.holders[place] = task.worker
    meter.outstanding.add(place)
    version = meter.versions.get(group, task.policy.version)
    meter.counts["early group begun again"] += version < task.policy.version
    meter.versions[group] = task.policy.version


def _place(work: GenerateFragment | FragmentGenerated) -> str:
    slot = work.fragment
    return f"{slot.batch}.{slot.group}.{slot.first_sample}.{slot.attempt}"
