"""The first host of a run: its brokers, its scheduler and its page, at an address for the others.

Their data are in the folder in which the keys are, so that commands of this host find the run there
as one of `digenrl up`.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from digenrl.local.brokers.private_network import private_network
from digenrl.local.processes.program import Program
from digenrl.local.processes.supervisor import Supervisor
from digenrl.local.running.command_lines import PAGE, command
from digenrl.local.runs import lock_run, write_address
from digenrl.local.secrets.keys import keys_in
from digenrl.local.secrets.tokens import KEYS
from shared.errors import UserError
from shared.recipe.recipe import Recipe

SCHEDULER_PORT, PAGE_PORT = 8000, 8001


@dataclass(frozen=True, slots=True)
class FirstHost:
    at: str
    """Address of this host for the others."""
    recipe_file: Path
    recipe: Recipe


@asynccontextmanager
async def lead(first: FirstHost, keys: Path) -> AsyncIterator[Supervisor]:
    """Run what a run has once, for the time of this block; yield its supervisor.

    Raises:
        UserError: if the address is not one of this machine, or another process has the run.
    """
    if keys.name != KEYS:
        raise UserError(
            f"--keys: {keys} has to be called {KEYS}; the run's data are in the folder around it"
        )
    data, run = keys.parent, first.recipe.run.name
    with lock_run(data.parent, data.name):
        async with private_network(first.at, data, run) as supervisor:
            for program in (_page(first, data), _scheduler(first, data)):
                await supervisor.start(program, wait=False)
            yield supervisor
            await supervisor.stop(["scheduler", PAGE])


def _scheduler(first: FirstHost, data: Path) -> Program:
    secrets = data / KEYS / "scheduler"
    write_address(data, f"http://127.0.0.1:{PAGE_PORT}")  # where commands ask: it has the tokens
    return Program(
        name="scheduler",
        argv=command(
            "serve", "scheduler", "--recipe", str(first.recipe_file),
            "--run", first.recipe.run.name, "--host", first.at, "--port", str(SCHEDULER_PORT),
        ),
        environment={
            **keys_in(data / KEYS).environment("scheduler"),
            "DIGENRL_API_TOKENS": str(data / KEYS / "api_tokens.json"),
            "DIGENRL_TLS_CERT": str(secrets / "cert.pem"),
            "DIGENRL_TLS_KEY": str(secrets / "key.pem"),
        },
    )  # fmt: skip


def _page(first: FirstHost, data: Path) -> Program:
    write_address(data, f"http://127.0.0.1:{PAGE_PORT}", "page")
    return Program(
        name=PAGE,
        argv=command(
            "view", "--scheduler", f"https://{first.at}:{SCHEDULER_PORT}",
            "--token-file", str(data / KEYS / "operator.token"), "--port", str(PAGE_PORT),
        ),
        environment={
            **keys_in(data / KEYS).environment("client"),
            "DIGENRL_API_TOKENS": str(data / KEYS / "api_tokens.json"),
            "DIGENRL_RUN": first.recipe.run.name,
        },
        optional=True,
    )  # fmt: skip
