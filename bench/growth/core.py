"""CPU seconds of the scheduler's core, by the number of devices: opening a batch, and an event."""

import heapq
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from random import Random

from services.scheduler.core.inputs import MachineInput, WorkerJoined
from services.scheduler.core.machine import step
from services.scheduler.core.state import Plan, State
from shared.learning.prompts import PromptOrder
from shared.learning.windows import Windows
from shared.messages.contracts import (
    Command,
    FragmentGenerated,
    FragmentScored,
    GenerateFragment,
    GroupTrained,
    ObjectRef,
    Policy,
    PolicyPublished,
    Prompt,
    TrainGroup,
    Trajectories,
)
from shared.recipe.schedule import RunSchedule

GROUP_SIZE = 16
SCORERS = "proxy"
REF = ObjectRef(key="bench/object", sha256="0" * 64, size=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class CoreCosts:
    devices: int
    fragments: int
    """Issued when the batch opened."""
    opening_seconds: float
    """CPU seconds of the one step that opens a batch."""
    event_seconds: float
    """Mean CPU seconds of all later events of the batch."""
    slowest_seconds: float
    """CPU seconds of the slowest of them."""
    events: int


def plan_of(devices: int, fragments_per_device: int, *, batches: int = 10**6) -> Plan:
    """A batch of so many fragments of four samples."""
    return Plan(
        prompts=PromptOrder(tuple(Prompt(text=f"prompt {number}") for number in range(97)), seed=0),
        num_batches=batches,
        num_groups=devices * fragments_per_device * 4 // GROUP_SIZE,
        group_size=GROUP_SIZE,
        windows=Windows(first=0, last=2),
        seed=0,
        schedule=RunSchedule(fragment_size=4),
    )


def policy_of(version: int) -> Policy:
    return Policy(version=version, weights_digest=f"{version:064x}")


def published(version: int) -> PolicyPublished:
    return PolicyPublished(
        policy=policy_of(version), weights=REF, worker="trainer-0", seconds=0.0, checksum=None
    )


def results_of(
    command: Command, seconds: float = 1.0
) -> Iterator[FragmentGenerated | FragmentScored | GroupTrained]:
    """What workers answer to a command; ``seconds``: that a fragment takes."""
    if isinstance(command, GenerateFragment):
        stored = Trajectories(
            trajectory=REF, conditions=REF, media=REF,
            weights_digest=command.policy.weights_digest,
        )  # fmt: skip
        rewards = tuple(float(sample) for sample in command.fragment.samples)
        yield FragmentGenerated(
            fragment=command.fragment, policy=command.policy, prompt=command.prompt, stored=stored,
            worker=command.worker, seconds=seconds,
        )  # fmt: skip
        yield FragmentScored(
            fragment=command.fragment, policy=command.policy, stored=stored, rewards=rewards,
            parts={SCORERS: rewards}, generated_by=command.worker, worker="reward-0", seconds=0.1,
        )  # fmt: skip
    if isinstance(command, TrainGroup):
        yield GroupTrained(
            batch=command.batch, group=command.group, attempt=command.attempt, worker="trainer-0",
            seconds=0.01,
        )  # fmt: skip


def measure(devices: int, *, fragments_per_device: int = 2, helping: int = 0) -> CoreCosts:
    """Open the second batch, whose speeds are known, and bring it to its end.

    ``helping``: fragments that the trainer generates at the same time.
    """
    plan = plan_of(devices, fragments_per_device)
    joined = [WorkerJoined("trainer-0", "trainer-0", "trainer", concurrency=helping)]
    joined += [WorkerJoined(f"r{n}-0", f"r{n}", "rollout") for n in range(devices)]
    state = State()
    for each in joined:
        state, _ = step(plan, state, each, 0.0)
    state, _, _ = _batch(plan, state, 0)
    state, opening, events = _batch(plan, state, 1)
    return CoreCosts(
        devices=devices,
        fragments=opening[1],
        opening_seconds=opening[0],
        event_seconds=sum(events) / len(events),
        slowest_seconds=max(events),
        events=len(events),
    )


def _batch(plan: Plan, state: State, version: int) -> tuple[State, tuple[float, int], list[float]]:
    """The state at its end, seconds and fragments of its opening, and seconds of each event."""
    random, now = Random(version), 1e3 * version
    state, commands, seconds = _timed(plan, state, published(version), now)
    opening = seconds, sum(isinstance(each, GenerateFragment) for each in commands)
    events, numbers = list[float](), count()
    due, free = list[tuple[float, int, MachineInput]](), dict[str, float]()
    while True:
        for command in commands:
            for at, event in _answers(command, now, free, random):
                heapq.heappush(due, (at, next(numbers), event))
        if not due:
            return state, opening, events
        now, _, event = heapq.heappop(due)
        state, commands, seconds = _timed(plan, state, event, now)
        events.append(seconds)


def _answers(
    command: Command, now: float, free: dict[str, float], random: Random
) -> Iterator[tuple[float, MachineInput]]:
    """What workers answer, and when; ``free``: until when each device has work."""
    worker = command.worker if isinstance(command, GenerateFragment) else ""
    at = max(now, free.get(worker, 0.0))
    for result in results_of(command, random.uniform(0.9, 1.1)):
        at += result.seconds
        if isinstance(result, FragmentGenerated):
            free[worker] = at
        yield at, result


def _timed(
    plan: Plan, state: State, event: MachineInput, now: float
) -> tuple[State, list[Command], float]:
    began = time.process_time()
    state, commands = step(plan, state, event, now)
    return state, commands, time.process_time() - began
