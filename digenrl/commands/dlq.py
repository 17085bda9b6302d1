"""`digenrl dlq`: the dead letters of a run."""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

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
from digenrl.local.runs import Run, find_run, run_in_folder, runs_folder
from digenrl.reading.wording import visible
from shared.errors import UserError

if TYPE_CHECKING:
    from digenrl.dead_letters import Desk
    from digenrl.letter_book import Book


class ListsByDefault(TyperGroup):
    """Takes `digenrl dlq RUN` for `digenrl dlq list RUN`, with its options."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        first = args[0]
        if first not in self.commands and not first.startswith("-") and not ctx.resilient_parsing:
            if not _may_be_run(first, args):
                raise UserError(
                    f"{first}: there is no such run, and no such command; commands are "
                    f"{', '.join(sorted(self.commands))}, and `digenrl dlq RUN` lists the letters "
                    "of a run"
                )
            args = ["list", *args]
        return super().resolve_command(ctx, args)


def _may_be_run(word: str, args: list[str]) -> bool:
    """Return whether a word may name a run: there is one, or others than this host know."""
    options = [each.partition("=") for each in args[1:]]
    if any(name == "--scheduler" for name, _, _ in options):
        return True
    folder = runs_folder()
    for number, (name, _, value) in enumerate(options):
        if name == "--runs":
            folder = Path(value or "".join(args[number + 2 : number + 3]))
    is_elsewhere = "DIGENRL_STORE_URL" in os.environ and "--help" not in args
    return is_elsewhere or "/" in word or run_in_folder(word, folder) is not None


dlq = typer.Typer(
    cls=ListsByDefault,
    help="Dead letters of a run: messages that nobody could use, and attempts that failed. "
    "`digenrl dlq RUN` lists them.",
    no_args_is_help=True,
)
Numbers = Annotated[list[int] | None, typer.Argument(help="numbers of letters")]
FEW = 5
"""Retried letters that are listed beside the reasons."""
LIMIT = 50
"""Letters that are listed one by one, unless more are asked for."""
AllOpen = Annotated[bool, typer.Option("--all", help="every open letter")]


@dlq.command("list")
def list_letters(
    run: RunArgument = "",
    settled: Annotated[
        bool, typer.Option("--all", help="one by one, also those that are over or were settled")
    ] = False,
    reason: Annotated[
        str, typer.Option(help="one by one, only those whose reason contains this text")
    ] = "",
    limit: Annotated[
        int | None, typer.Option(min=1, max=200, help="one by one, so many at most; 50 by default")
    ] = None,
    before: Annotated[
        int | None, typer.Option(min=1, help="one by one, only those with a smaller number")
    ] = None,
    scheduler: SchedulerAddress = "",
    token_file: TokenFile = None,
    as_json: AsJson = False,
    runs: Runs = RUNS,
) -> None:
    """List why letters are open, a line for each reason; or letters one by one, newest first."""
    from digenrl.letter_book import Book

    named = find_run(run, runs, reads=True)
    with _desk_of(named, scheduler, token_file) as desk:
        book = Book.read(desk, named.name)
    found = book.chosen("all" if settled else "open", before, reason)
    if as_json:
        typer.echo(json.dumps(found[: limit or LIMIT], indent=1))
        return
    _echo(book.hints())
    if not (found or settled):
        found = book.chosen("retried", before, reason) + book.chosen("over", before, reason)
    if not found:
        typer.echo("no dead letters")
    elif settled or reason or limit or before:
        shown = sorted(found, key=lambda each: -each["number"])[: limit or LIMIT]
        _echo(book.lines(shown))
        if len(shown) < len(found):
            typer.echo(f"older ones: --before {shown[-1]['number']}")
    else:
        _echo(book.reasons(book.chosen("open") or book.chosen("over")))
        _echo(book.lines(book.retried()[:FEW]))
        typer.echo("one by one: --limit 10; of a reason: --reason TEXT; also those over: --all")


@contextmanager
def _desk_of(run: Run, scheduler: str, token_file: Path | None) -> "Iterator[Desk]":
    """Yield where to ask: the scheduler of a run in progress, or else the store.

    Raises:
        UserError: if there is no such run, or its scheduler does not answer.
    """
    from digenrl.dead_letters import Desk
    from digenrl.local.reading import reading

    with reading(run, scheduler, token_file, role="operator", of="scheduler") as found:
        yield Desk(*found)


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
    """Show all that is known of a letter, what has become of its work, and its message."""
    from digenrl.letter_book import Book, shown_lines

    with _desk_of(find_run(run, runs), scheduler, token_file) as desk:
        found, book = desk.letter(number), Book.read(desk, run)
    found["outcome"] = book.outcome(found)
    if as_json:
        typer.echo(json.dumps(found, indent=1))
    else:
        _echo(shown_lines(found))


@dlq.command()
def retry(
    run: RunName,
    numbers: Numbers = None,
    every: AllOpen = False,
    resume: Annotated[
        bool,
        typer.Option("--resume", help="then go on with the run, and wait for the outcome"),
    ] = False,
    scheduler: SchedulerAddress = "",
    token_file: TokenFile = None,
    as_json: AsJson = False,
    runs: Runs = RUNS,
) -> None:
    """Have the work of letters done again; a run that has failed by it goes on.

    Example: `digenrl dlq retry demo --all --resume`, of a run that was paused. If the work fails
    again, the run is paused again.
    """
    if resume and as_json:
        raise UserError("--json: not together with --resume, which says what comes of it")
    _check(numbers, every)
    with _desk_of(find_run(run, runs), scheduler, token_file) as desk:
        said = _settle("retry", desk, run, numbers or [], every)
        _print(said, as_json)
        done = [number for each in said if each["done"] for number in each["letters"]]
        if resume and done:
            desk.client.resume_run()
            typer.echo(f"{run} goes on", err=True)
            _echo(_outcomes(desk, run, done))
    if not all(each["done"] for each in said):
        raise typer.Exit(1)


def _check(numbers: list[int] | None, every: bool) -> None:
    if bool(numbers) == every:
        raise UserError("NUMBERS: name letters, or all open ones with --all")


def _outcomes(desk: "Desk", run: str, numbers: list[int]) -> list[str]:
    """Wait for what becomes of letters, and say so."""
    from digenrl.steering import until_known

    told = ""

    def say(line: str) -> None:
        nonlocal told
        if line != told:
            typer.echo(line, err=True)
        told = line

    return until_known(desk, run, numbers, say)


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
    """Say that nobody needs letters any more; nothing of the run changes."""
    _check(numbers, every)
    with _desk_of(find_run(run, runs), scheduler, token_file) as desk:
        said = _settle("drop", desk, run, numbers or [], every)
    _print(said, as_json)
    if not all(each["done"] for each in said):
        raise typer.Exit(1)


def _settle(
    action: Literal["retry", "drop"], desk: "Desk", run: str, numbers: list[int], every: bool
) -> list[dict[str, Any]]:
    """Settle letters one by one; return what was said of each."""
    from digenrl.letter_book import Book, every_open

    book = Book.read(desk, run)
    return [_one(book, desk, each, action) for each in numbers or every_open(book)]


def _print(said: list[dict[str, Any]], as_json: bool) -> None:
    if as_json:
        fields = ("number", "done", "note")
        typer.echo(json.dumps([{key: each[key] for key in fields} for each in said], indent=1))
        return
    for each in said:
        typer.echo(f"{each['number']}: {each['note']}")
    if not said:
        typer.echo("no dead letters")


def _one(
    book: "Book", desk: "Desk", number: int, action: Literal["retry", "drop"]
) -> dict[str, Any]:
    """Settle a letter; ``letters``: which one that was, if there is a later one about the work."""
    try:
        note = book.settle(desk, number, action)
        return {"number": number, "done": True, "note": note, "letters": [book.newest(number)]}
    except UserError as error:
        return {"number": number, "done": False, "note": str(error), "letters": []}
