"""Judges a run of fluid devices by what they had in memory, what was stored and what was committed,
and not by what the scheduler believed. Every check gives a line per violation.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from services.scheduler.core.state import Plan
from services.scheduler.sim.commits import Commit
from services.scheduler.sim.history import History
from services.scheduler.sim.history_events import (
    Committed,
    Fact,
    Fault,
    Interval,
    Moved,
    Stored,
    Summed,
    SumName,
    Taken,
    Totalled,
)
from shared.messages.contracts import Policy, TrainGroup
from shared.messages.fluid import (
    ExchangeMissed,
    ExchangeSums,
    Piece,
    SumHeld,
    TakeStep,
    WeightsStored,
)
from tests.faults import check
from tests.faults.evidence import Evidence, gather

Cell = tuple[int, int, int]
"""Group, sample, trained step."""


@dataclass(slots=True)
class Memory:
    """What the devices had in memory."""

    base: Evidence
    sums: dict[tuple[str, SumName], list[Summed]] = field(default_factory=dict)
    totals: list[Totalled] = field(default_factory=list)
    moves: list[Moved] = field(default_factory=list)
    taken: list[Taken] = field(default_factory=list)
    stored: list[Stored] = field(default_factory=list)
    ended: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    """Address -> when its lease ended."""
    started: list[Fault] = field(default_factory=list)
    committed: dict[int, float] = field(default_factory=dict)
    """Version -> when its record was made."""


def violations(plan: Plan, history: History, commits: Sequence[Commit]) -> list[str]:
    base = gather(plan, history, commits)
    memory = Memory(base)
    for fact in history.facts:
        _remember(memory, fact)
    found = [line for each in SHARED for line in each(base)]
    return [*found, *(line for each in CHECKS for line in each(memory))]


def _remember(memory: Memory, fact: Fact) -> None:
    match fact:
        case Summed():
            memory.sums.setdefault((fact.device, fact.sum), []).append(fact)
        case Totalled():
            memory.totals.append(fact)
        case Moved():
            memory.moves.append(fact)
        case Taken():
            memory.taken.append(fact)
        case Stored():
            memory.stored.append(fact)
        case Fault():
            _remember_fault(memory, fact)
        case Committed(accepted=True, version=version):
            memory.committed.setdefault(version, fact.time)
        case _:
            pass


def _remember_fault(memory: Memory, fault: Fault) -> None:
    if fault.what == "lease ended":
        memory.ended[fault.target].append(fault.time)
    elif fault.what == "started":
        memory.started.append(fault)


def totals(memory: Memory) -> Iterator[str]:
    """Whatever is stepped with is made of every (sample, step) of the update once, each gradient
    taken at the weights that the step goes from."""
    for move, total in _stepped_with(memory):
        cells = Counter(cell for piece, _ in _pieces(memory, total) for cell in _cells(piece))
        wanted = Counter(_all(memory.base.plan, move.update))
        if cells != wanted:
            wrong = sorted(set((cells - wanted) + (wanted - cells)))[:5]
            yield f"{total.device} steps batch {total.batch} with {wrong} twice or not at all"
        weights = {weights[:32] for _, weights in _pieces(memory, total)}
        if weights != {move.before}:
            yield f"{total.device} has summed gradients of batch {total.batch} at other weights"


def records(memory: Memory) -> Iterator[str]:
    """A record names the groups, and the pieces, that its version was really made of."""
    for record in memory.base.commits[1:]:
        move = next((m for m in memory.moves if m.sum_id and m.after == record.checksum), None)
        totals = [] if move is None else [_total_of(memory, m) for m in _up_to(memory, move)]
        if len(totals) != memory.base.plan.updates:
            yield f"version {record.policy.version} was made by nobody's step"
            continue
        made = {piece for each in totals if each for piece, _ in _pieces(memory, each)}
        if made != {piece for share in record.shares for piece in share.pieces}:
            yield f"version {record.policy.version} names other pieces than are in it"
        groups = {(group.group, group.attempt) for group in record.trained}
        if groups != {(piece.group, piece.attempt) for piece in made}:
            yield f"version {record.policy.version} names other groups than are in it"


def advantages(memory: Memory) -> Iterator[str]:
    """Over the standard deviation of a batch, all are those of the very groups that are in it."""
    plan = memory.base.plan
    for record in memory.base.commits[1:]:
        if plan.advantages.std == "batch":
            scored = [
                (
                    [r for part in group.fragments for r in part.rewards],
                    {
                        name: [s for part in group.fragments for s in part.parts[name]]
                        for name in group.fragments[0].parts
                    },
                )
                for group in record.trained
            ]
            wanted = plan.advantages.of_batch(scored)
            if [group.advantages for group in record.trained] != wanted:
                yield f"version {record.policy.version} has advantages of other rewards"


def steps(memory: Memory) -> Iterator[str]:
    """Everybody steps from what is committed, with one total per attempt, and once."""
    by_attempt: dict[tuple[int, int, int], set[str]] = defaultdict(set)
    last: dict[str, Moved] = {}
    for move in memory.moves:
        before = last.get(move.device)
        last[move.device] = move
        if move.sum_id is None:
            continue
        by_attempt[move.batch, move.attempt, move.update].add(move.sum_id)
        if not move.update and move.before != memory.base.commits[move.batch].checksum:
            yield f"{move.device} steps batch {move.batch} from another state than the committed"
        if move.update and (before is None or not _follows(move, before)):
            yield f"{move.device} takes update {move.update} of batch {move.batch} out of turn"
        is_again = before is not None and before.sum_id is not None and before.batch == move.batch
        if is_again and not move.update:
            yield f"{move.device} steps batch {move.batch} twice"
    for (batch, attempt, _), sums in by_attempt.items():
        if len(sums) > 1:
            yield f"batch {batch}, attempt {attempt} was stepped with {len(sums)} totals"


def _follows(move: Moved, before: Moved) -> bool:
    """Whether an update goes from what the one before has made, of the same attempt."""
    of = before.batch, before.attempt, before.update + 1, before.after
    return before.sum_id is not None and of == (move.batch, move.attempt, move.update, move.before)


def survivors(memory: Memory) -> Iterator[str]:
    """Whoever goes on from a committed version has its very bits: with no other sum under it."""
    for record in memory.base.commits[1:]:
        sums = {m.sum_id for m in memory.moves if m.sum_id and m.after == record.checksum}
        if len(sums) > 1:
            yield f"version {record.policy.version} was made with {len(sums)} totals"


def confirmed(memory: Memory) -> Iterator[str]:
    """A step is ordered when each member of the round has answered, is lost, or is too late."""
    rounds: dict[tuple[int, int, int], tuple[float, ExchangeSums]] = {}
    answers: dict[tuple[int, int, int], set[str]] = defaultdict(set)
    for fact in memory.stored:
        if not fact.accepted:
            continue
        match fact.message:
            case ExchangeSums() as message:
                rounds[message.batch, message.attempt, message.round] = fact.time, message
            case SumHeld() | ExchangeMissed() as message:
                answers[message.batch, message.attempt, message.round].add(message.worker)
            case TakeStep() as message:
                key = message.batch, message.attempt, message.round
                since, command = rounds[key]
                for share in command.shares:
                    lost = any(time >= since - 12 for time in memory.ended.get(share.worker, ()))
                    lost = lost or _is_succeeded(memory, share.worker, fact.time)
                    late = fact.time > since + command.max_seconds
                    if share.worker not in answers[key] and not lost and not late:
                        yield f"step {key} was ordered before {share.worker} had answered"


def _is_succeeded(memory: Memory, address: str, time: float) -> bool:
    """Whether another start of the same worker was there by then, which may take its name."""
    name, _, life = address.rpartition("-")
    starts = (fact.target.rpartition("-") for fact in memory.started if fact.time <= time)
    return any(other == name and number != life for other, _, number in starts)


def durable(memory: Memory) -> Iterator[str]:
    """No group is trained before the record of the version that generated it exists."""
    for fact in memory.stored:
        if isinstance(fact.message, TrainGroup) and fact.message.batch:
            made = memory.committed.get(fact.message.batch)
            if made is None or fact.time < made:
                yield f"batch {fact.message.batch} is trained before its version is committed"


def fetched(memory: Memory) -> Iterator[str]:
    """Who only generates is given a version once its weights are stored, and is told where."""
    stored: dict[Policy, float] = {}
    for fact in memory.stored:
        if isinstance(fact.message, WeightsStored):
            stored.setdefault(fact.message.policy, fact.time)
    for begun in memory.base.begun.values():
        policy = begun.task.policy
        if not begun.device.startswith("rollout"):
            continue
        records = memory.base.commits[policy.version : policy.version + 1]
        made = memory.committed.get(policy.version, 0.0) if policy.version else 0.0
        if any(each.policy == policy for each in records) and made <= begun.time:
            continue
        if begun.task.weights is None or stored.get(policy, math.inf) > begun.time:
            yield f"{begun.device} is to generate by version {policy.version} which is nowhere"


def whole_work(memory: Memory) -> Iterator[str]:
    """Weights change between two pieces of work, never within one."""
    work: dict[str, list[Interval]] = defaultdict(list)
    for interval in memory.base.intervals:
        if interval.use in ("generate", "train"):
            work[interval.device].append(interval)
    changes = [(each.device, each.time) for each in memory.moves if not each.beside]
    for device, time in (*changes, *((each.device, each.time) for each in memory.taken)):
        for interval in work[f"{device}/0"]:
            if interval.begin + 1e-9 < time < interval.end - 1e-9:
                yield f"{device} changes weights at {time:.3f} in the middle of work"


def _stepped_with(memory: Memory) -> list[tuple[Moved, Totalled]]:
    found = [(move, _total_of(memory, move)) for move in memory.moves if move.sum_id is not None]
    return [(move, total) for move, total in found if total is not None]


def _up_to(memory: Memory, last: Moved) -> list[Moved]:
    """The steps of a device that have led to the last of a batch."""
    found = [
        each for each in memory.moves
        if each.sum_id is not None and each.time <= last.time
        and (each.device, each.batch, each.attempt) == (last.device, last.batch, last.attempt)
    ]  # fmt: skip
    return found[-(last.update + 1) :]


def _total_of(memory: Memory, move: Moved) -> Totalled | None:
    """The newest total that the device held when it stepped."""
    held = [t for t in memory.totals if t.device == move.device and t.time <= move.time]
    return held[-1] if held else None


def _pieces(memory: Memory, total: Totalled) -> list[tuple[Piece, str]]:
    return [
        (fact.piece, fact.weights)
        for device, name in total.sums
        for fact in memory.sums.get((device, name), [])
        if fact.piece is not None and fact.time <= total.time
    ]


def _cells(piece: Piece) -> Iterator[Cell]:
    for sample in piece.samples:
        for step in piece.steps:
            yield piece.group, sample, step


def _all(plan: Plan, update: int) -> Iterator[Cell]:
    for group in plan.part(update):
        for sample in range(plan.trained_samples or plan.group_size):
            for step in range(plan.trained_steps):
                yield group, sample, step


SHARED: tuple[Callable[[Evidence], Iterator[str]], ...] = (
    check.begun, check.slots, check.chain, check.samples, check.versions, check.trajectories,
)  # fmt: skip
CHECKS: tuple[Callable[[Memory], Iterator[str]], ...] = (
    totals, records, advantages, steps, survivors, confirmed, durable, fetched, whole_work,
)  # fmt: skip
