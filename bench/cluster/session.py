"""Runs of the emulated cluster, one after the other over the same brokers."""

import asyncio
import contextlib
import json
import shutil
import tempfile
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path

import httpx

from bench.cluster.processes import JOINING_S, SETTING, joined_key, services_of
from bench.cluster.setting import Setting, recipe_of, write_prompts
from bench.runner import figures
from bench.runner.figures import Interval
from bench.runner.session import Session, open_session
from bench.runner.watch import OnCommit, Watch, service, watching
from digenrl.local.brokers.embedded import Program
from digenrl.local.limits import CHILD_STOP_S
from digenrl.local.processes.ports import free_ports
from digenrl.local.secrets.tokens import Tokens
from services.scheduler.costs.floor import floor_seconds
from shared.messages import subjects
from shared.messages.fluid import WeightsStored

MEMORY = Path("/dev/shm")
"""Objects are files in memory: SeaweedFS takes 10 ms of a core for each MB that is put, and 2 ms
for each object, more than two cores have at these rates."""
MALLOC = {"MALLOC_MMAP_THRESHOLD_": str(1 << 30), "MALLOC_TRIM_THRESHOLD_": str(1 << 30)}
"""Makes the emulated hosts, all on this machine, use memory again: a new page costs as much time as
filling it does."""
SILENCE_S = 60.0
TIMES = 3.0
"""A batch takes at most so many times as long as it does at its best."""
Beside = Callable[[str, int], AbstractAsyncContextManager[None]]


@dataclass(frozen=True, slots=True, kw_only=True)
class EmulatedRun(figures.RunRecord):
    """What was seen of one run. Asking the broker delays what comes next, so the first sample is of
    the last commit but one of the warm-up."""

    setting: Setting
    overshoot: dict[str, dict[str, float]]
    """Service -> how much too long it slept."""
    stored: dict[int, float]
    """Version -> when its weights could be fetched, if a fluid device has made it."""


async def run(
    session: Session,
    setting: Setting,
    warm_up: int,
    last: int,
    note: OnCommit,
    beside: Beside = lambda run, port: contextlib.nullcontext(),
) -> EmulatedRun:
    """Runs until version ``last`` is committed; ``note`` is told of each version.

    ``beside``: what goes on meanwhile, by the run's name and its scheduler's port.

    Raises:
        Unavailable: if a service has died, or nothing is committed any more.
    """
    session.num_runs += 1
    setting = setting.model_copy(update={"run": f"{setting.run}-{session.num_runs}"})
    folder, emulated = session.new_folder(setting.run), services_of(setting)
    [port] = free_ports(1)
    async with started(session, setting, folder, port) as watch, beside(setting.run, port):
        begin, end = await watch.follow(warm_up - 1, last, note, streams=True)
        usage = await watch.usage(last)
    found = {name: json.loads((folder / f"{name}.json").read_text()) for name in emulated}
    return EmulatedRun(
        setting=setting,
        commits=watch.commits,
        begin=begin,
        end=end,
        usage=usage,
        intervals=[Interval(**each) for one in found.values() for each in one["intervals"]],
        overshoot={name: one["overshoot"] for name, one in found.items()},
        stored={
            each.message.policy.version: each.at
            for each in watch.heard
            if isinstance(each.message, WeightsStored)
        },
    )


@contextlib.asynccontextmanager
async def started(
    session: Session, setting: Setting, folder: Path, port: int | None = None
) -> AsyncIterator[Watch]:
    """Starts the services of a run, and returns once all devices have joined.

    ``port``: of the scheduler; None: a free one.
    """
    _prepare(folder, setting)
    port = port or free_ports(1)[0]
    announcements = [
        subjects.event_subject(setting.run, "policy_published"),
        f"dg.{setting.run}.fluid.*.stored.>",
    ]
    async with watching(
        session, setting.run, folder / "logs", announcements, patience_s=_patience(setting),
        stop_s=CHILD_STOP_S,
    ) as watch:  # fmt: skip
        for program in _programs(session, folder, services_of(setting), port):
            await watch.services.start(program, wait=False)
        await watch.or_failed(_all_joined(session.tokens, port, setting))
        await session.store.create(joined_key(setting.run), b"")
        yield watch


def _patience(setting: Setting) -> float:
    """Returns the seconds without a commit after which a run has failed."""
    profile = setting.load_profile()
    devices = {kind: 0 for kind in (*setting.rollout, *setting.trainer)}
    for pool in (setting.rollout, setting.trainer):
        devices |= {kind: devices[kind] + count for kind, count in pool.items()}
    return SILENCE_S + TIMES * floor_seconds(profile, devices) / setting.scale


@contextlib.asynccontextmanager
async def opened(parent: Path, *, on_disk: bool = False) -> AsyncIterator[Session]:
    """Opens a session with brokers of its own; nothing of it is left but logs if it fails.

    ``on_disk``: objects lie there, and not in memory.
    """
    folder, memory = _folders(parent)
    if on_disk:
        memory = folder
    with tempfile.TemporaryDirectory(
        prefix="digenrl-bench-", dir=memory, ignore_cleanup_errors=True
    ) as objects:
        async with open_session(folder, folder, objects=Path(objects)) as session:
            yield session
    shutil.rmtree(folder, ignore_errors=True)


def _folders(parent: Path) -> tuple[Path, Path | None]:
    """Returns a folder for brokers and logs, and where objects are kept in memory."""
    parent.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="cluster-", dir=parent))
    return folder, MEMORY if MEMORY.is_dir() else None


def _prepare(folder: Path, setting: Setting) -> None:
    (folder / SETTING).write_text(setting.model_dump_json(indent=1))
    write_prompts(folder, setting.load_profile().shape.groups * setting.steps)
    (folder / "recipe.json").write_text(recipe_of(setting, folder).model_dump_json(indent=1))


async def _all_joined(tokens: Tokens, port: int, setting: Setting) -> None:
    """Waits until the scheduler, at ``port``, knows all workers."""
    wanted = {
        "rollout": setting.num_rollout,
        "reward": setting.num_reward,
        "trainer": setting.num_trainer,
    }
    async with httpx.AsyncClient(verify=False, headers=tokens.headers("viewer")) as client:
        while True:
            with contextlib.suppress(httpx.TransportError):
                answer = await client.get(f"http://127.0.0.1:{port}/v1/run")
                known = answer.json()["num_workers"] if answer.is_success else {}  # it stands by
                if all(known.get(service) == wanted[service] for service in wanted):
                    return
            await asyncio.sleep(JOINING_S)


def _programs(session: Session, folder: Path, emulated: Sequence[str], port: int) -> list[Program]:
    """Returns the scheduler as it is always run, and the emulation of the others."""
    scheduler = [
        "digenrl", "serve", "scheduler", "--recipe", str(folder / "recipe.json"),
        "--port", str(port),
    ]  # fmt: skip
    workers = {name: ["bench.cluster.processes", name, str(folder)] for name in emulated}
    modules = {"scheduler": scheduler} | workers
    return [service(name, module, **MALLOC, **session.of(name)) for name, module in modules.items()]
