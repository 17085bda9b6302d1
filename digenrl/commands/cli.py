"""The ``digenrl`` command, which imports what a command needs only when that command runs."""

import os
import sys
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from digenrl.commands.adapter import adapter
from digenrl.commands.check import check
from digenrl.commands.copy import copy
from digenrl.commands.dlq import dlq
from digenrl.commands.doctor import doctor
from digenrl.commands.evaluate import evaluate
from digenrl.commands.export import export
from digenrl.commands.families import families
from digenrl.commands.fetch import fetch
from digenrl.commands.follow import follow
from digenrl.commands.gc import gc
from digenrl.commands.generate import generate
from digenrl.commands.history import audit, samples, versions
from digenrl.commands.host import host
from digenrl.commands.hosts import hosts
from digenrl.commands.init import init
from digenrl.commands.keys import keys
from digenrl.commands.logs import logs
from digenrl.commands.model import model
from digenrl.commands.plan import plan
from digenrl.commands.push import push
from digenrl.commands.recipe import recipe
from digenrl.commands.recipe_options import RecipeCommand
from digenrl.commands.repair import repair
from digenrl.commands.report import report
from digenrl.commands.reproduce import reproduce
from digenrl.commands.reward import reward, rewards
from digenrl.commands.runs import runs
from digenrl.commands.serve import serve
from digenrl.commands.serve_scorer import serve_scorer
from digenrl.commands.status import status, watch
from digenrl.commands.steer import add_actions, tag, workers
from digenrl.commands.up import up
from digenrl.commands.view import view
from digenrl.trace.device_profile.command import profile
from shared.errors import DigenRLError, UserError
from shared.proxies import go_direct
from shared.release import RELEASE

EXIT_FAILED = 1
EXIT_USER_ERROR = 2

TASKS = {
    "Run": ("up", "reproduce", "serve", "serve-scorer", "host", "hosts"),
    "Look at runs": (
        "runs", "status", "watch", "view", "logs", "workers", "versions", "samples", "audit",
    ),
    "Steer a run": ("pause", "resume", "stop", "tag", "dlq"),
    "Use what it has learned": ("report", "export", "generate", "evaluate", "follow", "push"),
    "Prepare": ("init", "check", "recipe", "plan", "profile", "fetch", "adapter"),
    "Extend": ("reward", "rewards", "families", "model"),
    "Mend": ("doctor", "copy", "gc", "repair", "keys"),
}  # fmt: skip
"""Commands by what they are for, as the help lists them."""
MAX_SUMMARY = 200
"""Letters of a command's first sentence: it is wrapped, not cut."""
EPILOG = (
    "Exit codes: 0 done; 1 failed, or something is wrong; 2 the request is wrong, the message says "
    "how to mend it; 3 a part of a report has failed; 130 interrupted. Most commands print JSON "
    "with --json. Completion for your shell: digenrl --install-completion. Documentation: "
    "docs/guide.md."
)


class ByTask(TyperGroup):
    """Lists commands by their tasks."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        for task, names in TASKS.items():
            with formatter.section(task):
                formatter.write_dl(
                    [(each, self.commands[each].get_short_help_str(MAX_SUMMARY)) for each in names]
                )


app = typer.Typer(
    name="digenrl",
    cls=ByTask,
    help="Reinforcement learning for image and video generators, on GPUs that need not be alike.",
    epilog=EPILOG,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # importing rich takes longer than everything else together
)
app.command("profile")(profile)
of_runs = (doctor, status, watch, view, logs, report, export, follow, evaluate, gc, repair, host)
now_and_before = (runs, workers, tag, versions, samples, audit)
own = (serve_scorer, rewards, families, copy)
for command in (*of_runs, *now_and_before, *own, push):
    app.command()(command)
add_actions(app)
for of_recipe in (init, up, reproduce, check, fetch, serve, generate, plan):
    app.command(cls=RecipeCommand)(of_recipe)
app.add_typer(hosts, name="hosts")
app.add_typer(model, name="model")
app.add_typer(adapter, name="adapter")
app.add_typer(recipe, name="recipe")
app.add_typer(keys, name="keys")
app.add_typer(reward, name="reward")
app.add_typer(dlq, name="dlq")


def _say_version(is_given: bool) -> None:
    if is_given:
        typer.echo(f"digenrl {RELEASE}")
        raise typer.Exit


@app.callback()
def options_of_all(
    version: Annotated[
        bool,
        typer.Option(
            "--version", is_eager=True, callback=_say_version, help="print the version and exit"
        ),
    ] = False,
) -> None:
    """Declare the options that precede a command."""


def main() -> None:
    run_command(app)


def run_command(command: typer.Typer) -> None:
    """Run a command; report an error of ours in one line, exit code 2 if the user can fix it."""
    go_direct()
    os.environ.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")  # the order of nvidia-smi
    if "PYTORCH_CUDA_ALLOC_CONF" not in os.environ:
        os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    try:
        command()
    except UserError as error:
        typer.echo(f"digenrl: {error}", err=True)
        sys.exit(EXIT_USER_ERROR)
    except DigenRLError as error:
        typer.echo(f"digenrl: {error}", err=True)
        sys.exit(EXIT_FAILED)
