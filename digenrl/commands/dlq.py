"""`digenrl dlq`: the dead letters of a run."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from digenrl.commands.options import (
    RUNS,
    AsJson,
    RunArgument,
    RunName,
    Runs,
    SchedulerAddress,
    TokenFile,
)
from digenrl.local.runs import Run, find_run
from digenrl.reading.wording import visible
from shared.errors import UserError

if TYPE_CHECKING:
    from digenrl.api.client import Client
    from digenrl.local.connection import Connection


class ListsByDefault(TyperGroup):
    """Takes `digenrl dlq RUN` for `digenrl dlq list RUN`, with its options."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        is_run = args[0] not in self.commands and not args[0].startswith("-")
        return super().resolve_command(ctx, ["list", *args] if is_run else args)


dlq = typer.Typer(
    cls=ListsByDefault,
    help="Dead letters of a run: unusable messages, and failed attempts. "
    "`digenrl dlq RUN` lists them.",
    no_args_is_help=True,
)
Numbers = Annotated[list[int] | None, typer.Argument(help="numbers of letters")]
AllOpen = Annotated[bool, typer.Option("--all", help="every open letter")]
PER_REQUEST = 200


@dlq.command("list")
def list_letters(
    run: RunArgument = "",
    every: Annotated[
        bool, typer.Option("--all", help="one by one, newest first, settled letters as well")
    ] = False,
    scheduler: SchedulerAddress = "",
    token_file: TokenFile = None,
    as_json: AsJson = False,
    runs: Runs = RUNS,
) -> None:
    """List why letters are open, a line for each reason, and what helps; or all letters."""
    from digenrl.reading.letters import advice, line, reasons

    with _reading(find_run(run, runs, reads=True), scheduler, token_file) as (client, is_live):
        letters = newest_first(client)
        helps = advice(client.get_run().model_dump(), letters) if is_live else []
    opened = [each for each in letters if each["state"] == "open"]
    if as_json:
        typer.echo(json.dumps(letters if every else opened, indent=1))
        return
    lines = [line(each) for each in letters] if every else [*reasons(opened), *helps]
    none = f"none is open; all {len(letters)}: --all" if letters else "no dead letters"
    _echo(lines or [none])


def newest_first(client: "Client") -> list[dict[str, Any]]:
    """Return all letters of a run."""
    found: list[dict[str, Any]] = []
    while more := client.list_dead_letters(
        "all", PER_REQUEST, found[-1]["number"] if found else None
    ):
        found += [each.model_dump(mode="json") for each in more]
    return found


@contextmanager
def _reading(run: Run, scheduler: str, token_file: Path | None) -> "Iterator[Connection]":
    """Yield a client of the scheduler of a run in progress, or else of the run's store.

    Raises:
        UserError: if there is no such run, or its scheduler does not answer.
    """
    from digenrl.local.connection import connect

    with connect(run, scheduler, token_file, role="operator", services=("scheduler",)) as found:
        yield found


def _echo(lines: list[str]) -> None:
    for each in lines:
        typer.echo(visible(each))


@dlq.command()
def show(
    run: RunName,
    number: Annotated[int, typer.Argument(min=1, help="number of the letter")],
    scheduler: SchedulerAddress = "",
    token_file: TokenFile = None,
    as_json: AsJson = False,
    runs: Runs = RUNS,
) -> None:
    """Show a letter, what has become of its work, and its message."""
    from digenrl.reading.letters import detail

    with _reading(find_run(run, runs), scheduler, token_file) as (client, _):
        found = client.get_dead_letter(number).model_dump(mode="json")
    if as_json:
        typer.echo(json.dumps(found, indent=1))
    else:
        _echo(detail(found))


@dlq.command()
def retry(
    run: RunName,
    numbers: Numbers = None,
    every: AllOpen = False,
    resume: Annotated[bool, typer.Option("--resume", help="then resume the run")] = False,
    scheduler: SchedulerAddress = "",
    token_file: TokenFile = None,
    as_json: AsJson = False,
    runs: Runs = RUNS,
) -> None:
    """Repeat the work of letters; a run that has failed because of it continues.

    Example: `digenrl dlq retry demo --all --resume`, of a run that was paused. If the work fails
    again, the run is paused again.
    """
    from digenrl.reading.letters import is_useful

    _check(numbers, every)
    with _reading(find_run(run, runs), scheduler, token_file) as (client, _):
        chosen = numbers or [each["number"] for each in newest_first(client) if is_useful(each)]
        done = _settle(client.retry_dead_letter, chosen, as_json)
        if resume and any(done):
            client.resume_run()
            typer.echo(f"{run} goes on; what comes of it: `digenrl dlq list {run} --all`", err=True)
    if not all(done):
        raise typer.Exit(1)


@dlq.command()
def drop(
    run: RunName,
    numbers: Numbers = None,
    every: AllOpen = False,
    scheduler: SchedulerAddress = "",
    token_file: TokenFile = None,
    as_json: AsJson = False,
    runs: Runs = RUNS,
) -> None:
    """Mark letters as not needed; nothing else of the run changes."""
    _check(numbers, every)
    with _reading(find_run(run, runs), scheduler, token_file) as (client, _):
        letters = [] if numbers else newest_first(client)
        opened = [each["number"] for each in letters if each["state"] == "open"]
        done = _settle(client.drop_dead_letter, numbers or opened, as_json)
    if not all(done):
        raise typer.Exit(1)


def _check(numbers: list[int] | None, every: bool) -> None:
    if bool(numbers) == every:
        raise UserError("NUMBERS: name letters, or all open ones with --all")


def _settle(action: Callable[[int], Any], numbers: list[int], as_json: bool) -> list[bool]:
    """Settle letters one by one, and print what happens; return which were settled."""
    results = []
    for number in numbers:
        try:
            results.append({"number": number, "done": True, "note": action(number).note})
        except UserError as error:
            results.append({"number": number, "done": False, "note": str(error)})
    lines = [f"{each['number']}: {each['note']}" for each in results] or ["no such dead letters"]
    typer.echo(json.dumps(results, indent=1) if as_json else "\n".join(map(visible, lines)))
    return [bool(each["done"]) for each in results]
