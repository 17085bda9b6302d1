"""`digenrl dlq`: the dead letters of a run."""

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from typer.core import TyperGroup

from digenrl.commands.options import RUNS, AsJson, RunName, Runs, SchedulerAddress
from shared.errors import UserError

if TYPE_CHECKING:
    from digenrl.dead_letters import Book, Desk, State


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
    folder = RUNS
    for number, (name, _, value) in enumerate(options):
        if name == "--runs":
            folder = Path(value or "".join(args[number + 2 : number + 3]))
    is_elsewhere = "DIGENRL_STORE_URL" in os.environ and "--help" not in args
    return is_elsewhere or (folder / word).is_dir()


dlq = typer.Typer(
    cls=ListsByDefault,
    help="Dead letters of a run: messages that nobody could use, and attempts that failed. "
    "`digenrl dlq RUN` lists them.",
    no_args_is_help=True,
)
Numbers = Annotated[list[int] | None, typer.Argument(help="numbers of letters")]
LIMIT = 50
"""Letters that are listed one by one, unless more are asked for."""
AllOpen = Annotated[bool, typer.Option("--all", help="every open letter")]


@dlq.command("list")
def list_letters(
    run: RunName,
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
    as_json: AsJson = False,
    runs: Runs = RUNS,
) -> None:
    """List why letters are open, a line for each reason; or letters one by one, newest first."""
    from digenrl.dead_letters import Book, desk_of

    with desk_of(run, runs, scheduler) as desk:
        book = Book.read(desk, run)
    state: State = "all" if settled else "open"
    found = book.chosen(state, before, reason)
    shown = found[: limit or LIMIT]
    if as_json:
        typer.echo(json.dumps(shown, indent=1))
        return
    _echo(book.hints())
    over = book.chosen("over")
    if not found and (settled or reason or not over):
        typer.echo("no dead letters")
    elif settled or reason or limit or before:
        _echo(book.lines(shown))
        if len(shown) < len(found):
            typer.echo(f"older ones: --before {shown[-1]['number']}")
    else:
        _echo(book.reasons(found or over))
        typer.echo("one by one: --limit 10; of a reason: --reason TEXT; also those over: --all")


def _echo(lines: list[str]) -> None:
    for each in lines:
        typer.echo(each)


@dlq.command()
def show(
    run: RunName,
    number: Annotated[int, typer.Argument(min=1, help="number of the letter")],
    scheduler: SchedulerAddress = "",
    as_json: AsJson = False,
    runs: Runs = RUNS,
) -> None:
    """Show all that is known of a letter, what has become of its work, and its message."""
    from digenrl.dead_letters import Book, desk_of, shown_lines

    with desk_of(run, runs, scheduler) as desk:
        found, book = desk.letter(number), Book.read(desk, run)
    found["outcome"] = book.outcome(found)
    if as_json:
        typer.echo(json.dumps(found, indent=1))
    else:
        _echo(shown_lines(found))


def _add(action: Literal["retry", "drop"], what: str) -> None:
    @dlq.command(action, help=what)
    def settle(
        run: RunName,
        numbers: Numbers = None,
        every: AllOpen = False,
        scheduler: SchedulerAddress = "",
        as_json: AsJson = False,
        runs: Runs = RUNS,
    ) -> None:
        _settle(action, run, numbers or [], every, scheduler, as_json, runs)


_add("retry", "Have the work of letters done again; a run that has failed by it goes on.")
_add("drop", "Say that nobody needs letters any more; nothing of the run changes.")


def _settle(
    action: Literal["retry", "drop"],
    run: str,
    numbers: list[int],
    every: bool,
    scheduler: str,
    as_json: bool,
    runs: Path,
) -> None:
    """Settle letters one by one; exits with 1 if something could not be done."""
    from digenrl.dead_letters import Book, desk_of, every_open

    if bool(numbers) == every:
        raise UserError("NUMBERS: name letters, or all open ones with --all")
    with desk_of(run, runs, scheduler) as desk:
        book = Book.read(desk, run)
        said = [_one(book, desk, each, action) for each in numbers or every_open(book)]
    if as_json:
        typer.echo(json.dumps(said, indent=1))
    else:
        for each in said:
            typer.echo(f"{each['number']}: {each['note']}")
        if not said:
            typer.echo("no dead letters")
    if not all(each["done"] for each in said):
        raise typer.Exit(1)


def _one(
    book: "Book", desk: "Desk", number: int, action: Literal["retry", "drop"]
) -> dict[str, object]:
    try:
        return {"number": number, "done": True, "note": book.settle(desk, number, action)}
    except UserError as error:
        return {"number": number, "done": False, "note": str(error)}
