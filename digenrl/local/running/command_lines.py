"""Builds the command lines of a local run's processes, except its brokers."""

import sys
from collections.abc import Awaitable, Callable

from digenrl.local.brokers.embedded import Program
from digenrl.local.checking.preflight import LocalRun
from digenrl.local.processes.ports import free_ports
from digenrl.planning.entries import encoder_names, reward_names, rollout_names, trainer_names
from shared.messages.rights import Role

Ready = Callable[[], Awaitable[bool]]
PAGE = "view"
"""Name of the program that serves the run's page."""


def command(*arguments: str) -> list[str]:
    """Return the command line of this installation's `digenrl`."""
    return [sys.executable, "-m", "digenrl", *arguments]


def worker_programs(local: LocalRun, ready: Ready) -> list[Program]:
    recipe, run = local.recipe, local.recipe.run.name
    processes: dict[Role, list[str]] = {
        "rollout": rollout_names(recipe),
        "encoder": encoder_names(recipe),
        "reward": reward_names(recipe),
        "trainer": trainer_names(recipe),
    }
    names = [(service, name) for service, each in processes.items() for name in each]
    ports = free_ports(len(names))
    return [
        Program(
            name=worker,
            argv=_launched(
                recipe.trainer.shard_devices if service == "trainer" else 1,
                "serve", service, "--worker", worker, "--port", str(port),
                "--stay",  # the supervisor stops them in order
            ),
            environment={
                "DIGENRL_RUN": run,
                **local.keys.environment(service),
                **local.gpus.environments[worker],
            },
            ready=ready,
            reports_work=True,
        )
        for (service, worker), port in zip(names, ports, strict=True)
    ]  # fmt: skip


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
        "view", local.recipe.run.name, "--port", str(port),
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
        name="follow",
        argv=command("follow", "--run", local.recipe.run.name, *given),
        ready=ready,
    )


def _launched(num_ranks: int, *arguments: str) -> list[str]:
    """Return the command line, of as many processes as there are ranks."""
    if num_ranks == 1:
        return command(*arguments)
    ranks = [sys.executable, "-m", "digenrl.local.processes.ranks", str(num_ranks)]
    return [*ranks, "digenrl", *arguments]
