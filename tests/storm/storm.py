"""Random faults of all services and brokers of a small run, as a function of a seed."""

import asyncio
import contextlib
import random
import shutil
import signal
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from shared.errors import Unavailable
from shared.run.layout import batch_folder
from tests.storm.cluster import Cluster, cluster, every_service, until
from tests.storm.judge import violations_of
from tests.storm.lagging import NAME, known
from tests.storm.small import small

Kind = Literal["kill", "terminate", "freeze", "hang", "wipe", "flip"]
KINDS: Mapping[Kind, int] = {"kill": 12, "terminate": 3, "freeze": 5}
"""Kinds of a short storm, and the weight of each."""
ALL_KINDS: Mapping[Kind, int] = {
    "kill": 14, "terminate": 3, "freeze": 3, "hang": 1, "wipe": 2, "flip": 2
}  # fmt: skip
"""Kinds of a long one. A broker that is wiped has lost its data when it comes back; services have
none, and are killed. What flips is a bit of an object of the newest batch."""
GAP_S = 1.0
"""Mean seconds between two faults, which are drawn from half of it to one and a half."""
FROZEN_S: Mapping[Kind, tuple[float, float]] = {"freeze": (0.5, 6.5), "hang": (15.0, 25.0)}
"""Seconds that a process is stopped: at most a little longer than a worker's lease, or much."""
DATA = {"nats": "nats/jetstream", "valkey": "valkey/appendonlydir"}
"""Where brokers keep what may be lost: the store's objects may not."""
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
    """Seconds for which the process is stopped."""

    def __str__(self) -> str:
        long = f" for {self.seconds:.1f} s" if self.seconds else ""
        return f"{self.kind} {self.target}{long}"


def faults(
    seed: int,
    number: int,
    targets: list[str],
    kinds: Mapping[Kind, int] = KINDS,
    gap: float = GAP_S,
) -> list[Fault]:
    """Return faults that strike every target about equally often, in any order.

    Args:
        gap: mean seconds between two of them.
    """
    return list(_faults(random.Random(seed), number, targets, kinds, gap))


def _faults(
    draw: random.Random, number: int, targets: list[str], kinds: Mapping[Kind, int], gap: float
) -> Iterator[Fault]:
    deck: list[str] = []
    for _ in range(number):
        if not deck:
            deck = draw.sample(targets, len(targets))
        kind = draw.choices(list(kinds), weights=list(kinds.values()))[0]
        seconds = draw.uniform(*FROZEN_S[kind]) if kind in FROZEN_S else 0.0
        yield Fault(deck.pop(), kind, draw.uniform(0.5 * gap, 1.5 * gap), seconds)


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
    waits: list[float]
    """Seconds from each fault to the next step of the run, as far as one came."""
    violations: list[str]


async def weather(run: Cluster, planned: list[Fault]) -> Storm:
    """Let a storm pass.

    Raises:
        AssertionError: if the run does not go on afterwards.
    """
    struck: list[float] = []
    steps: list[float] = []
    over = asyncio.Event()
    watching = asyncio.create_task(_watch(run, steps, over))
    async with asyncio.TaskGroup() as thawing:
        for number, fault in enumerate(planned):
            await asyncio.sleep(fault.after)
            struck.append(time.monotonic())
            await _strike(run, fault, number, thawing)
    began, commits = time.monotonic(), await _commits(run)
    await run.until_step(commits - 1 + CALM_STEPS, seconds=CALM_S)
    calm = time.monotonic() - began
    over.set()
    await watching
    nexts = (next((step for step in steps if step > moment), None) for moment in struck)
    waits = [step - moment for moment, step in zip(struck, nexts, strict=True) if step is not None]
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
        waits=waits,
        violations=await violations_of(run),
    )


async def _commits(run: Cluster) -> int:
    """Number of versions, as soon as the store answers."""
    await run.until_step(0)
    return await run.num_commits() or await _commits(run)


async def _watch(run: Cluster, steps: list[float], over: asyncio.Event) -> None:
    """Note when versions come, until it is over."""
    known = 0
    while not over.is_set():
        found = await run.num_commits()
        if found > known:
            known = found
            steps.append(time.monotonic())
        await asyncio.sleep(0.1)


async def _strike(run: Cluster, fault: Fault, number: int, thawing: asyncio.TaskGroup) -> None:
    match fault.kind:
        case "kill":
            run.send(fault.target, signal.SIGKILL)
        case "terminate":
            run.send(fault.target, signal.SIGTERM)
        case "freeze" | "hang":
            thawing.create_task(_freeze(run, fault))
        case "wipe" if fault.target in DATA:
            await wipe(run, fault.target)
        case "wipe":
            run.send(fault.target, signal.SIGKILL)
        case "flip":
            await _flip(run, random.Random(number))


async def wipe(run: Cluster, broker: str) -> None:
    """Kill a broker, whose next start finds nothing."""
    child = run.children[broker]
    child.kept = False
    child.send(signal.SIGKILL)
    await until(lambda: not child.is_alive)
    folder = run.folder / DATA[broker]
    if folder.is_dir():
        await asyncio.to_thread(shutil.rmtree, folder)
    child.kept = True


async def _flip(run: Cluster, draw: random.Random) -> None:
    """Change one bit of an object of the newest batch, if the store can be reached and has one."""
    with contextlib.suppress(Unavailable, OSError):
        batch = await run.num_commits() - 1
        keys = await run.store.keys(batch_folder(run.recipe.run.name, batch))
        if not keys:
            return
        key = draw.choice(keys)
        data = bytearray(await run.store.read(key) or b"\0")
        data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
        await run.store.write(key, bytes(data))


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


async def through(
    folder: Path,
    seed: int,
    number: int,
    *,
    kinds: Mapping[Kind, int] = KINDS,
    gap: float = GAP_S,
    standby: bool = False,
    **changes: Any,
) -> Storm:
    """Return what became of a run with TAG, a trainer of two devices and an encoder.

    Args:
        gap: mean seconds between two faults.
        standby: whether there is a second scheduler.
        changes: to the setting of the run.
    """
    setting = small(
        folder, groups=8, rollout={"H100": 3}, trainer={"H100": 2}, tag=1, steps=1_000_000,
        encoders=1, shard_bytes=SHARD_BYTES, **changes,
    )  # fmt: skip
    services = [*every_service(setting), *(["scheduler-1"] if standby else [])]
    with known():
        keys = {"trainer.checkpoint_every": CHECKPOINT_EVERY}
        async with cluster(
            folder / "run", setting, changes=keys, services=services, stores_in="s3"
        ) as run:
            await run.until_step(1)
            return await weather(run, faults(seed, number, list(run.children), kinds, gap))
