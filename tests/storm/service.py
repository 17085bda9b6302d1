"""One process of a small emulated cluster: one rollout device, one reward worker, the trainer, or
the scheduler as it is always run.

Processes are forked from one that has imported everything, so that a service is there again a few
hundredths of a second after it was killed.
"""

import os
import sys
from collections.abc import Coroutine, Mapping
from pathlib import Path

import uvloop

import services.scheduler.shell.service  # noqa: F401 -- what the scheduler's command imports
from bench.cluster.build import Emulation, rollout_devices
from bench.cluster.processes import (
    SETTING,
    Work,
    run_encoder,
    run_host,
    run_reward,
    run_until_told,
    trainer,
)
from bench.cluster.setting import Setting
from digenrl import cli
from digenrl.local.linux import die_with_parent
from shared.process.otlp import tracing
from shared.process.settings import ServiceSettings
from shared.telemetry import configure_logs
from tests.storm.small import known


def run_service(name: str, folder: Path, environment: Mapping[str, str], port: int) -> None:
    """Run a service until SIGTERM.

    ``name``: scheduler, trainer, rollout-0, reward-1, ...; ``port``: of the scheduler's API.
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
        return trainer(emulation)
    running: Coroutine[None, None, None]
    if service == "reward":
        running = run_reward(emulation, [int(number)])
    elif service == "encoder":
        running = run_encoder(emulation, name)
    else:
        running = run_host(emulation, name, [rollout_devices(emulation)[int(number)]])
    return Work([], running)
