"""One process of the emulated cluster: all rollout devices, all reward workers, or the members of
one host.

    python -m bench.cluster.processes rollout FOLDER
    python -m bench.cluster.processes members-2 FOLDER

FOLDER holds setting.json; DIGENRL_* variables say where the brokers are, as for every service. Told
to end, it leaves FOLDER/<service>.json: what its devices did, and how much too long they slept.
"""

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import Callable, Coroutine, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import uvloop

from bench.cluster.build import Emulation, member_hosts, nodes, rollout_devices
from bench.cluster.generation import EmulatedEncoder, EmulatedRollout
from bench.cluster.hold import Held, overshoot
from bench.cluster.member_host import MemberHost
from bench.cluster.scoring import EmulatedScorer
from bench.cluster.setting import Setting
from bench.cluster.stores import NodeStore
from services.reward.app import RewardApp
from services.reward.scorer import WeightedScorer
from services.rollout.app import RolloutApp
from services.rollout.encoder import EncoderApp
from shared.devices.conditions import EncodedConditions
from shared.messages.workers import Device
from shared.process.service import freeze_gc, give_threads
from shared.process.settings import ServiceSettings
from shared.process.worker import Worker, WorkerContext, host_memory
from shared.run.conditions import Encoding
from shared.run.layout import weights_folder
from shared.run.run_recipe import wait_for_recipe
from shared.store import CacheSettings, ObjectStore, open_store
from shared.store.host_cache import host_cache
from shared.telemetry import configure_logs

SETTING = "setting.json"
ENCODING = Encoding(
    model="0" * 64, negative=False, text_tokens=0, dtype="float32", matmul_precision="high"
)
"""How emulated devices encode: they have no model."""
KEPT_VERSIONS = 4
"""Versions that an emulated host has in its cache."""
MANIFEST_BYTES = 1 << 20
AGAIN_S = 1.0
JOINING_S = 0.05
"""Between two looks at whether all have joined."""


@dataclass(frozen=True, slots=True)
class Work:
    held: list[Held]
    """The emulated devices."""
    running: Coroutine[None, None, None]


def rollout(emulation: Emulation) -> Work:
    """Gives each host a connection to the bus, with all its devices on it."""
    devices = rollout_devices(emulation)

    async def run() -> None:
        async with asyncio.TaskGroup() as tasks:
            for number, host in enumerate(nodes(devices)):
                tasks.create_task(run_host(emulation, f"host-{number}", host))

    return Work([device.held for device in devices], run())


async def run_host(emulation: Emulation, name: str, devices: list[EmulatedRollout]) -> None:
    """Runs rollout devices that share a connection to the bus, and the adapters that they fetch."""
    setting, settings = emulation.setting, _settings(emulation, name)
    backend = open_store(settings.store).backend
    async with (
        host_cache(_cache(emulation, settings), redis_url="", run=setting.run) as cache,
        settings.connect_bus() as bus,
        settings.connect_index() as index,
        asyncio.TaskGroup() as tasks,
    ):
        store = NodeStore(backend, weights_folder(setting.run), emulation.line(), cache=cache)
        for device in devices:
            registered = emulation.registered(device.kind, "rollout", concurrency=1)
            worker = Worker("rollout", device.held.name, "waiting_for_trainer", registered)
            context = WorkerContext(bus, store, worker)
            limit = setting.schedule.staleness_limit
            app = RolloutApp(
                device, context, index, max_staleness=limit, encoded=_encoded(emulation, store)
            )
            tasks.create_task(app.run())


def _cache(emulation: Emulation, settings: ServiceSettings) -> CacheSettings:
    """Returns the cache of a host, where the store is: a few versions fit, with their states if
    these have all their bytes."""
    assert settings.cache is not None, "DIGENRL_HOST_CACHE names no folder"
    sizes = emulation.sizes
    states = sizes.checkpoint if emulation.setting.all_bytes else 0
    limit = KEPT_VERSIONS * (sizes.adapter + states + MANIFEST_BYTES)
    return replace(
        settings.cache, folder=settings.cache.folder / settings.run / settings.worker, limit=limit
    )


def _encoded(emulation: Emulation, store: ObjectStore) -> EncodedConditions | None:
    """Returns where devices that generate find conditions; None if they encode for themselves."""
    setting = emulation.setting
    return EncodedConditions(store, setting.run, ENCODING) if setting.encoders else None


async def run_encoder(emulation: Emulation, name: str) -> None:
    """Runs an encoder, whose device encodes as fast as it can."""
    settings, sizes = _settings(emulation, name), emulation.sizes
    store = open_store(settings.store)
    recipe = await wait_for_recipe(store, settings.run)
    async with settings.connect_bus() as bus:
        worker = Worker("encoder", name, "waiting_for_trainer", Device(memory_bytes=host_memory()))
        context = WorkerContext(bus, store, worker)
        await EncoderApp(EmulatedEncoder(sizes), context, recipe, ENCODING).run()


def reward(emulation: Emulation) -> Work:
    return Work([], run_reward(emulation, range(emulation.setting.num_reward)))


async def run_reward(emulation: Emulation, numbers: Iterable[int]) -> None:
    """Runs the workers of these numbers on one connection to the bus."""
    settings = _settings(emulation, "reward")
    scorers = [WeightedScorer("emulated", 1.0, EmulatedScorer())]
    device = Device(memory_bytes=host_memory())
    store = open_store(settings.store)
    async with settings.connect_bus() as bus, asyncio.TaskGroup() as tasks:
        for each in numbers:
            worker = Worker("reward", f"reward-{each}", "waiting_for_rollout", device)
            tasks.create_task(RewardApp(scorers, WorkerContext(bus, store, worker)).run())


def members(emulation: Emulation, host: int) -> Work:
    """Runs the members of one host."""
    here = MemberHost(emulation, member_hosts(emulation.setting)[host])

    async def run() -> None:
        run, settings = emulation.setting.run, _settings(emulation, f"members-{host}")
        await here.run(
            settings,
            lambda store: until_joined(store, run),
            lambda store: _encoded(emulation, store),
            _cache(emulation, settings) if emulation.setting.all_bytes else None,
        )

    return Work([each.held for each in here.members.values()], run())


def encoder(emulation: Emulation) -> Work:
    return Work([], run_encoder(emulation, "encoder"))


async def until_joined(store: ObjectStore, run: str) -> None:
    while True:
        if await store.read(joined_key(run)) is not None:
            return
        await asyncio.sleep(JOINING_S)


def joined_key(run: str) -> str:
    """Returns the key of the object that lets members publish the first version.

    A run begins with all devices, as in the simulator. Which ones the first batch lacks would show
    in every later one: where a batch is hardly more than one fragment per device, who has what goes
    on from batch to batch.
    """
    return f"{run}/joined"


def _settings(emulation: Emulation, name: str) -> ServiceSettings:
    return ServiceSettings(run=emulation.setting.run, worker=name)


SERVICES: dict[str, Callable[[Emulation], Work]] = {
    "rollout": rollout,
    "reward": reward,
    "encoder": encoder,
}
MEMBERS = "members-"
"""Begins the names of the processes with members, which go on with the number of the host."""


def services_of(setting: Setting) -> list[str]:
    """Returns the processes that emulate the devices of a run, by their names."""
    found = ["rollout"] if setting.num_rollout else []
    found += ["encoder"] if setting.encoders else []
    hosts = range(setting.num_member_hosts)
    return [*found, "reward", *(f"{MEMBERS}{host}" for host in hosts)]


def work_of(service: str, emulation: Emulation) -> Work:
    if service.startswith(MEMBERS):
        return members(emulation, int(service.removeprefix(MEMBERS)))
    return SERVICES[service](emulation)


async def run_until_told(work: Work, *, is_unscaled: bool = False) -> None:
    """Runs until the end of the work, or SIGTERM.

    Of many emulated hosts, on a folder in memory, more threads than cores only wait for one
    another's lock. One that ``is_unscaled``, with a disk, has as many as any service.

    Everything is cancelled, and again if need be: in Python 3.11 `wait_for` loses a cancellation
    that comes in the same moment as what it waits for.
    """
    if is_unscaled:
        give_threads()
    else:
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(os.cpu_count()))
    task, told = asyncio.create_task(work.running), asyncio.Event()
    for signum in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(signum, told.set)
    waiting = asyncio.create_task(told.wait())
    await asyncio.wait({task, waiting}, return_when=asyncio.FIRST_COMPLETED)
    while not task.done():
        for each in asyncio.all_tasks() - {asyncio.current_task()}:
            each.cancel()
        await asyncio.wait({task}, timeout=AGAIN_S)
    with contextlib.suppress(asyncio.CancelledError):
        task.result()


def main(service: str, folder: Path) -> None:
    setting = Setting.model_validate_json((folder / SETTING).read_text())
    configure_logs(service=service, worker=service, run=setting.run)
    work = work_of(service, Emulation.of(setting))
    freeze_gc()
    uvloop.run(run_until_told(work, is_unscaled=setting.all_bytes))
    found = {
        "intervals": [each._asdict() for held in work.held for each in held.intervals],
        "overshoot": asdict(overshoot(work.held)),
    }
    (folder / f"{service}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
