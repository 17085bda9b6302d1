"""Random kills and stops of all services and brokers of a small run, as a function of a seed."""

import asyncio
import random
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from tests.storm.cluster import Cluster, cluster
from tests.storm.judge import violations_of
from tests.storm.lagging import NAME, known
from tests.storm.small import small

Kind = Literal["kill", "terminate", "freeze"]
KINDS: dict[Kind, int] = {"kill": 12, "terminate": 3, "freeze": 5}
"""Weights of the kinds, of 20."""
GAP_S = (0.5, 1.5)
"""Seconds between two faults."""
FROZEN_S = (0.5, 6.5)
"""Seconds that a process is stopped; at most longer than a worker's lease."""
SHARD_BYTES = 600_000
"""Bytes of a shard: every version's weights and checkpoint have four."""
CHECKPOINT_EVERY = 3
"""Versions from one whose optimizer state is stored to the next: a trainer that was killed trains
the batches since then again."""
CALM_STEPS = 3
"""Steps that the run takes after the last fault."""
CALM_S = 40.0
"""Seconds in which it must have taken them."""


@dataclass(frozen=True, slots=True)
class Fault:
    target: str
    kind: Kind
    after: float
    """Seconds since the one before."""
    seconds: float = 0.0
    """Seconds for which the process is frozen."""

    def __str__(self) -> str:
        long = f" for {self.seconds:.1f} s" if self.kind == "freeze" else ""
        return f"{self.kind} {self.target}{long}"


def faults(seed: int, number: int, targets: list[str]) -> list[Fault]:
    """Faults that strike every target about equally often, in any order."""
    return list(_faults(random.Random(seed), number, targets))


def _faults(draw: random.Random, number: int, targets: list[str]) -> Iterator[Fault]:
    deck: list[str] = []
    for _ in range(number):
        if not deck:
            deck = draw.sample(targets, len(targets))
        kind = draw.choices(list(KINDS), weights=list(KINDS.values()))[0]
        seconds = draw.uniform(*FROZEN_S) if kind == "freeze" else 0.0
        yield Fault(deck.pop(), kind, draw.uniform(*GAP_S), seconds)


@dataclass(frozen=True, slots=True)
class Storm:
    """What a run has come through."""

    faults: list[Fault]
    commits: int
    """Versions when it was calm again, with the first one."""
    calm_seconds: float
    """Seconds from the last fault until the run had taken some more steps."""
    groups_by_rollout: int
    """Groups whose gradients rollout devices computed."""
    fragments_by_trainer: int
    """Fragments that the trainer's devices generated."""
    deaths: dict[str, int]
    """How often each process was restarted, by its own fault or by ours."""
    violations: list[str]


async def weather(run: Cluster, seed: int, number: int) -> Storm:
    """Let a storm pass; raises AssertionError if the run does not go on afterwards."""
    planned = faults(seed, number, list(run.children))
    async with asyncio.TaskGroup() as thawing:
        for fault in planned:
            await asyncio.sleep(fault.after)
            await _strike(run, fault, thawing)
    began, commits = time.monotonic(), await _commits(run)
    await run.until_step(commits - 1 + CALM_STEPS, seconds=CALM_S)
    calm = time.monotonic() - began
    trained = [group for record in await run.commits() for group in record.trained]
    return Storm(
        faults=planned,
        commits=await _commits(run),
        calm_seconds=calm,
        groups_by_rollout=sum(group.trained_by is not None for group in trained),
        fragments_by_trainer=sum(
            address.startswith("trainer") for group in trained for address in group.workers
        ),
        deaths=run.num_deaths,
        violations=await violations_of(run),
    )


async def _commits(run: Cluster) -> int:
    """Number of versions, as soon as the store answers."""
    await run.until_step(0)
    return await run.num_commits() or await _commits(run)


async def _strike(run: Cluster, fault: Fault, thawing: asyncio.TaskGroup) -> None:
    match fault.kind:
        case "kill":
            run.send(fault.target, signal.SIGKILL)
        case "terminate":
            run.send(fault.target, signal.SIGTERM)
        case "freeze":
            thawing.create_task(_freeze(run, fault))


async def _freeze(run: Cluster, fault: Fault) -> None:
    run.send(fault.target, signal.SIGSTOP)
    await asyncio.sleep(fault.seconds)
    run.send(fault.target, signal.SIGCONT)


HELPED: dict[str, Any] = {"gradient_help": True}
"""Rollout devices train as well."""
LAGGED: dict[str, Any] = {
    "algorithm": NAME, "nft_decay": 1, "updates": 2,
    "shape": {"shared_steps": 2.0, "merged_steps": 1},
}  # fmt: skip
"""Two optimizer steps per batch, groups that share their noise, and an old policy that generates.
Rollout devices do not have the weights between two steps, and do not train."""


async def through(folder: Path, seed: int, number: int, **changes: Any) -> Storm:
    """A run with TAG, a trainer of two devices and an encoder; ``changes`` to its setting."""
    setting = small(
        folder, groups=8, rollout={"H100": 3}, trainer={"H100": 2}, tag=1, steps=10_000,
        encoders=1, shard_bytes=SHARD_BYTES, **changes,
    )  # fmt: skip
    with known():
        keys = {"trainer.checkpoint_every": CHECKPOINT_EVERY}
        async with cluster(folder / "run", setting, changes=keys, stores_in="s3") as run:
            await run.until_step(1)
            return await weather(run, seed, number)
