"""Builds the command lines of a local run's processes, except its brokers."""

import sys
from collections.abc import Awaitable, Callable, Mapping
from functools import partial

from digenrl.local.brokers.embedded import Program
from digenrl.local.checking.preflight import LocalRun
from digenrl.local.processes.assignment import Environments
from digenrl.local.processes.gpus import VISIBLE
from digenrl.local.processes.ports import free_ports
from digenrl.local.processes.program import is_ready
from digenrl.local.secrets.keys import Keys
from digenrl.planning.entries import POLICY_ROLES, Processes
from shared.recipe.recipe import Recipe

Ready = Callable[[], Awaitable[bool]]
PAGE = "view"
"""Name of the program that serves the run's page."""


def command(*arguments: str) -> list[str]:
    """Return the command line of this installation's `digenrl`."""
    return [sys.executable, "-m", "digenrl", *arguments]


def worker_programs(
    recipe: Recipe,
    processes: Processes,
    keys: Keys,
    environments: Environments,
    *,
    host: str = "",
    stays: bool = True,
) -> list[Program]:
    """Return the workers of a host, of `digenrl up` if it has no name. Those that do not stay end
    with their run."""
    workers = [(role, name) for role in processes.counts for name in processes.names(role)]
    ports = free_ports(len(workers))
    return [
        Program(
            name=(worker := full_name(host, name, environments[name])),
            argv=_launched(
                recipe.trainer.shard_devices if role == "trainer" else 1,
                "serve", role, "--worker", worker, "--port", str(port),
                *(["--stay"] if stays else []),
            ),
            environment={
                "DIGENRL_RUN": recipe.run.name,
                **keys.environment(role),
                **environments[name],
            },
            ready=partial(is_ready, f"http://127.0.0.1:{port}"),
            reports_work=not host,
            may_finish=not stays,
        )
        for (role, name), port in zip(workers, ports, strict=True)
    ]  # fmt: skip


def full_name(host: str, name: str, environment: Mapping[str, str]) -> str:
    """Return the name of a worker in its run: its host, its role and its first GPU.

    >>> full_name("lab-2", "rollout-0", {"CUDA_VISIBLE_DEVICES": "3"})
    'lab-2-rollout-3'
    """
    if not host:
        return name
    role, number = name.rsplit("-", 1)
    gpu = environment.get(VISIBLE, "").partition(",")[0]
    return f"{host}-{role}-{gpu if role in POLICY_ROLES and gpu.isdigit() else number}"


def scheduler_program(local: LocalRun, ready: Ready) -> Program:
    argv = command(
        "serve", "scheduler", "--recipe", str(local.folder / "recipe.json"),
        "--port", str(local.api_port),
    )  # fmt: skip
    keys = local.keys.environment("scheduler")
    return Program(name="scheduler", argv=argv, environment=keys, ready=ready)


def page_program(local: LocalRun, port: int, ready: Ready) -> Program:
    """Return the program that serves the run's page; the run does not depend on it."""
    argv = command(
        "view", local.recipe.run.name, "--port", str(port), "--runs", str(local.folder.parent),
        "--scheduler", f"http://127.0.0.1:{local.api_port}",
        "--token-file", str(local.tokens.folder / "operator.token"),
    )  # fmt: skip
    environment = local.keys.environment("client")
    return Program(name=PAGE, argv=argv, environment=environment, ready=ready, optional=True)


def follower_program(local: LocalRun, ready: Ready) -> Program:
    """Return the program that writes step metrics; it is stopped after the last commit."""
    targets = local.targets
    wanted = {"--tensorboard": targets.tensorboard, "--wandb": targets.wandb}
    given = [part for name, value in wanted.items() if value for part in (name, str(value))]
    return Program(
        name="follow", argv=command("follow", "--run", local.recipe.run.name, *given), ready=ready
    )


def _launched(num_ranks: int, *arguments: str) -> list[str]:
    """Return the command line, of as many processes as there are ranks."""
    if num_ranks == 1:
        return command(*arguments)
    ranks = [sys.executable, "-m", "digenrl.local.processes.ranks", str(num_ranks)]
    return [*ranks, "digenrl", *arguments]
