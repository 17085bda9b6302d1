"""Does to a cluster what a fault says."""

import asyncio
import contextlib
import random
import shutil
import signal

from shared.errors import Unavailable
from shared.run.layout import batch_folder
from shared.telemetry import NATS_STORES_NOTHING
from tests.storm.cluster import Cluster, until, until_true
from tests.storm.disks import FILLER, fill, resize, squeeze
from tests.storm.faults import Fault

DISKS = {"nats": "512m", "objects": "12g"}
"""Sizes of the disks of brokers; they take memory only as they are written."""
DATA = {"nats": "nats/jetstream", "valkey": "valkey/appendonlydir"}
"""Where brokers keep what may be lost: the store's objects may not."""
SAID_WITHIN_S = 25.0
"""Longest time that a disk stays full."""


async def strike(
    run: Cluster, fault: Fault, draw: random.Random, lasting: asyncio.TaskGroup
) -> None:
    """Begin a fault; ``lasting``: takes what ends later."""
    match fault.kind:
        case "kill":
            run.send(fault.target, signal.SIGKILL)
        case "terminate":
            run.send(fault.target, signal.SIGTERM)
        case "freeze" | "hang":
            lasting.create_task(_freeze(run, fault))
        case "fill" if fault.target == "objects":
            lasting.create_task(fill_store(run, fault.seconds))
        case "fill":
            lasting.create_task(fill_nats(run))
        case "wipe":
            await wipe(run, fault.target)
        case "flip":
            await _flip(run, draw)


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


async def fill_store(run: Cluster, seconds: float) -> None:
    """Have the store's disk be full for some seconds."""
    folder = run.folder / "objects"
    await asyncio.to_thread(squeeze, folder)
    await asyncio.sleep(seconds)
    await asyncio.to_thread(resize, folder, DISKS["objects"])


async def fill_nats(run: Cluster) -> float | None:
    """Fill the disk of NATS until a scheduler says what is wrong; then do as it says.

    Returns the seconds until it said so, since there was no room; None if it did not, as when NATS
    was killed meanwhile.
    """
    folder = run.folder / "nats"
    await asyncio.to_thread(fill, folder)
    began = asyncio.get_running_loop().time()
    said: float | None = None

    async def is_said() -> bool:
        for name in ("scheduler", "scheduler-1"):
            if (await run.status(name))[1].startswith(NATS_STORES_NOTHING):
                return True
        return False

    with contextlib.suppress(AssertionError):
        await until_true(is_said, seconds=SAID_WITHIN_S)
        said = asyncio.get_running_loop().time() - began
    (folder / FILLER).unlink(missing_ok=True)
    run.send("nats", signal.SIGTERM)  # `digenrl up` does so, and elsewhere the alarm asks for it
    return said


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
