"""The ``digenrl`` command, which imports what a command needs only when that command runs."""

import sys
from importlib.metadata import version
from typing import Annotated

import typer

from digenrl.commands.brokers import brokers
from digenrl.commands.check import check
from digenrl.commands.check_family import check_family
from digenrl.commands.dlq import dlq
from digenrl.commands.doctor import doctor
from digenrl.commands.evaluate import evaluate
from digenrl.commands.export import export
from digenrl.commands.fetch import fetch
from digenrl.commands.follow import follow
from digenrl.commands.gc import gc
from digenrl.commands.generate import generate
from digenrl.commands.keys import keys
from digenrl.commands.lists import families, rewards
from digenrl.commands.logs import logs
from digenrl.commands.model import model
from digenrl.commands.plan import plan
from digenrl.commands.push import push
from digenrl.commands.recipe import recipe
from digenrl.commands.recipe_options import RecipeCommand
from digenrl.commands.repair import repair
from digenrl.commands.report import report
from digenrl.commands.reproduce import reproduce
from digenrl.commands.reward import reward
from digenrl.commands.serve import serve
from digenrl.commands.serve_scorer import serve_scorer
from digenrl.commands.sim import sim
from digenrl.commands.status import status, watch
from digenrl.commands.tail_check import tail_check
from digenrl.commands.up import up
from digenrl.commands.view import view
from digenrl.profile.command import command as profile
from shared.errors import DigenRLError, UserError

EXIT_FAILED = 1
EXIT_USER_ERROR = 2

app = typer.Typer(
    name="digenrl",
    help="Reinforcement learning for image and video generators, on GPUs that need not be alike.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # importing rich takes longer than everything else together
)
app.command("profile")(profile)
app.command("tail-check", cls=RecipeCommand)(tail_check)
of_runs = (doctor, status, watch, view, logs, report, export, follow, evaluate, gc, repair, brokers)
own = (serve_scorer, rewards, families, check_family)
for command in (*of_runs, *own, push, sim):
    app.command()(command)
for of_recipe in (up, reproduce, check, fetch, serve, generate, plan):
    app.command(cls=RecipeCommand)(of_recipe)
app.add_typer(model, name="model")
app.add_typer(recipe, name="recipe")
app.add_typer(keys, name="keys")
app.add_typer(reward, name="reward")
app.add_typer(dlq, name="dlq")


def _say_version(asked: bool) -> None:
    if asked:
        typer.echo(f"digenrl {version('digenrl')}")
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
    """Run a command; report an error of ours in one line, exit code 2 if the user can mend it."""
    try:
        command()
    except UserError as error:
        typer.echo(f"digenrl: {error}", err=True)
        sys.exit(EXIT_USER_ERROR)
    except DigenRLError as error:
        typer.echo(f"digenrl: {error}", err=True)
        sys.exit(EXIT_FAILED)
