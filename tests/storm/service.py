"""One process of a small emulated cluster: one rollout device, one reward worker, one
member, or the scheduler as it is always run.

Processes are forked from one that has imported everything, so that a service is there again a few
hundredths of a second after it was killed.
"""

import os
import sys
from collections.abc import Coroutine, Mapping
from pathlib import Path

import uvloop

import services.scheduler.shell.service  # noqa: F401 -- what the scheduler's command imports
from bench.cluster.build import Emulation, member_hosts, rollout_devices
from bench.cluster.processes import (
    ENCODING,
    SETTING,
    Work,
    run_encoder,
    run_host,
    run_reward,
    run_until_told,
    until_joined,
)
from bench.cluster.setting import Setting
from bench.cluster.stores import PublishingStore
from digenrl.commands import cli
from services.trainer.fluid.member import MemberApp
from services.trainer.fluid.store_exchange import StoreExchange
from shared.devices.conditions import EncodedConditions
from shared.process.linux import die_with_parent
from shared.process.otlp import tracing
from shared.process.settings import ServiceSettings
from shared.process.worker import Worker, WorkerContext
from shared.run.run_recipe import wait_for_recipe
from shared.store import ObjectStore, open_store
from shared.telemetry import configure_logs
from tests.storm.small import known
from tests.world.members import counting_member


def run_service(name: str, folder: Path, environment: Mapping[str, str], port: int) -> None:
    """Run a service until SIGTERM.

    ``name``: scheduler, trainer-h100-0, rollout-0, reward-1, ...; ``port``: of the scheduler's API.
    """
    if sys.platform == "linux":
        die_with_parent()
    os.setsid()
    log = os.open(folder / f"{name}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(log, stream)
    os.environ.update(environment)
    setting = Setting.model_validate_json((folder / SETTING).read_text())
    with known():
        _run(name, setting, folder, port)


def _run(name: str, setting: Setting, folder: Path, port: int) -> None:
    configure_logs(service=name.split("-")[0], worker=name, run=setting.run)
    if name.startswith("scheduler"):
        recipe = str(folder / "recipe.json")
        sys.argv = ["digenrl", "serve", "scheduler", "--recipe", recipe, "--port", str(port)]
        cli.main()
    else:
        with tracing(ServiceSettings(run=setting.run, worker=name), name.split("-")[0]):
            uvloop.run(run_until_told(_work(name, Emulation.of(setting))))


def _work(name: str, emulation: Emulation) -> Work:
    service, _, number = name.partition("-")
    if service == "trainer":
        return Work([], _be_member(emulation, name))
    running: Coroutine[None, None, None]
    if service == "reward":
        running = run_reward(emulation, [int(number)])
    elif service == "encoder":
        running = run_encoder(emulation, name)
    else:
        running = run_host(emulation, name, [rollout_devices(emulation)[int(number)]])
    return Work([], running)


async def _be_member(emulation: Emulation, name: str) -> None:
    setting = emulation.setting
    settings = ServiceSettings(run=setting.run, worker=name)
    store = PublishingStore(open_store(settings.store).backend, lines=emulation.lines())
    recipe = await wait_for_recipe(store, setting.run)
    named = next(each for host in member_hosts(setting) for each in host if each.name == name)

    async def joined() -> None:
        await until_joined(store, setting.run)

    member = counting_member(emulation, named, recipe, joined)
    concurrency = int(recipe.run_schedule.trainer_generates)
    registered = emulation.registered(named.kind, "trainer", concurrency=concurrency)
    worker = Worker("trainer", name, "waiting_for_rollout", registered)
    async with settings.connect_bus() as bus:
        app = MemberApp(
            member, member.generating, StoreExchange(store, member.layout), recipe,
            WorkerContext(bus, store, worker), encoded=encoded_of(emulation, store),
        )  # fmt: skip
        await app.run()


def encoded_of(emulation: Emulation, store: ObjectStore) -> EncodedConditions | None:
    """Return where conditions are, if encoders make them."""
    setting = emulation.setting
    return EncodedConditions(store, setting.run, ENCODING) if setting.encoders else None
