"""`digenrl dlq`: the dead letters of a run."""

import json
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from digenrl.commands import options
from digenrl.local.runs import Run, find_run
from digenrl.reading.wording import visible
from shared.errors import UserError

if TYPE_CHECKING:
    from digenrl.api.client import Client
    from digenrl.local.connection import Connection
    from services.scheduler.shell.api_letters import DeadLetterView, Wanted

dlq = typer.Typer(
    help="Dead letters of a run: unusable messages, and failed attempts.", no_args_is_help=True
)
Numbers = Annotated[list[int] | None, typer.Argument(help="numbers of letters")]
AllOpen = Annotated[bool, typer.Option("--all", help="every open letter")]
PER_REQUEST = 200


@dlq.command("list")
def list_letters(
    run: options.RunArgument = "",
    every: Annotated[
        bool, typer.Option("--all", help="one by one, newest first, settled letters as well")
    ] = False,
    scheduler: options.SchedulerAddress = "",
    token_file: options.TokenFile = None,
    as_json: options.AsJson = False,
    runs: options.Runs = options.RUNS,
) -> None:
    """List why letters are open, a line for each reason, and what helps; or all letters."""
    from digenrl.reading.letters import line, summary

    with _connect(find_run(run, runs, reads=True), scheduler, token_file) as (client, is_live):
        letters = all_letters(client, "all" if every else "open")
        now = client.get_run() if is_live else None
    lines = [*map(line, letters)] if every else summary(letters, now)
    none = "no dead letters" if every else "no dead letters are open; all: --all"
    stored = [each.model_dump(mode="json") for each in letters]
    typer.echo(json.dumps(stored, indent=1) if as_json else _visible(lines or [none]))


def all_letters(client: "Client", state: "Wanted") -> "list[DeadLetterView]":
    """Return all letters of a run in a state, newest first."""
    letters: list[DeadLetterView] = []
    while more := client.list_dead_letters(
        state, PER_REQUEST, letters[-1].number if letters else None
    ):
        letters += more
    return letters


def _connect(
    run: Run, scheduler: str, token_file: Path | None
) -> "AbstractContextManager[Connection]":
    """Connect to the scheduler of a run in progress, or else to the run's store.

    Raises:
        UserError: if there is no such run, or its scheduler does not answer.
    """
    from digenrl.local.connection import connect

    return connect(run, scheduler, token_file, role="operator", services=("scheduler",))


def _visible(lines: Sequence[str]) -> str:
    return "\n".join(map(visible, lines))


@dlq.command()
def show(
    run: options.RunName,
    number: Annotated[int, typer.Argument(min=1, help="number of the letter")],
    scheduler: options.SchedulerAddress = "",
    token_file: options.TokenFile = None,
    as_json: options.AsJson = False,
    runs: options.Runs = options.RUNS,
) -> None:
    """Show a letter, what has become of its work, and its message."""
    from digenrl.reading.letters import detail

    with _connect(find_run(run, runs), scheduler, token_file) as (client, _):
        letter = client.get_dead_letter(number)
    typer.echo(letter.model_dump_json(indent=1) if as_json else _visible(detail(letter)))


@dlq.command()
def retry(
    run: options.RunName,
    numbers: Numbers = None,
    every: AllOpen = False,
    resume: Annotated[bool, typer.Option("--resume", help="then resume the run")] = False,
    scheduler: options.SchedulerAddress = "",
    token_file: options.TokenFile = None,
    as_json: options.AsJson = False,
    runs: options.Runs = options.RUNS,
) -> None:
    """Repeat the work of letters; a run that has failed because of it continues.

    Example: `digenrl dlq retry demo --all --resume`, of a run that was paused. If the work fails
    again, the run is paused again.
    """
    _check(numbers, every)
    with _connect(find_run(run, runs), scheduler, token_file) as (client, _):
        opened = [] if numbers else all_letters(client, "open")
        useful = [each.number for each in opened if not each.outcome]
        done = _settle(client.retry_dead_letter, numbers or useful, as_json)
        if resume and any(done):
            client.resume_run()
            typer.echo(f"{run} goes on; what comes of it: `digenrl dlq list {run} --all`", err=True)
    if not all(done):
        raise typer.Exit(1)


@dlq.command()
def drop(
    run: options.RunName,
    numbers: Numbers = None,
    every: AllOpen = False,
    scheduler: options.SchedulerAddress = "",
    token_file: options.TokenFile = None,
    as_json: options.AsJson = False,
    runs: options.Runs = options.RUNS,
) -> None:
    """Mark letters as not needed; nothing else of the run changes."""
    _check(numbers, every)
    with _connect(find_run(run, runs), scheduler, token_file) as (client, _):
        opened = [] if numbers else all_letters(client, "open")
        done = _settle(
            client.drop_dead_letter, numbers or [each.number for each in opened], as_json
        )
    if not all(done):
        raise typer.Exit(1)


def _check(numbers: list[int] | None, every: bool) -> None:
    if bool(numbers) == every:
        raise UserError("NUMBERS: name letters, or all open ones with --all")


def _settle(action: Callable[[int], Any], numbers: Sequence[int], as_json: bool) -> list[bool]:
    """Settle letters one by one, and print what happens; return which were settled."""
    results = []
    for number in numbers:
        try:
            results.append({"number": number, "done": True, "note": action(number).note})
        except UserError as error:
            results.append({"number": number, "done": False, "note": str(error)})
    lines = [f"{each['number']}: {each['note']}" for each in results] or ["no such dead letters"]
    typer.echo(json.dumps(results, indent=1) if as_json else _visible(lines))
    return [bool(each["done"]) for each in results]
