"""`digenrl dlq`: the dead letters of a run."""

import base64
import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from typer.core import TyperGroup

from digenrl.commands.options import RUNS, AsJson, RunName, Runs, SchedulerAddress
from shared.errors import UserError

if TYPE_CHECKING:
    from digenrl.dead_letters import Desk, State


class ListsByDefault(TyperGroup):
    """Takes `digenrl dlq RUN` for `digenrl dlq list RUN`."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        names = [each for each in args if not each.startswith("-")]
        if len(names) == 1 and names[0] not in self.commands:
            args = ["list", *args]
        return super().resolve_command(ctx, args)


dlq = typer.Typer(
    cls=ListsByDefault,
    help="Dead letters of a run: messages that nobody could use, and attempts that failed. "
    "`digenrl dlq RUN` lists them.",
    no_args_is_help=True,
)
Numbers = Annotated[list[int] | None, typer.Argument(help="numbers of letters")]
AllOpen = Annotated[bool, typer.Option("--all", help="every open letter")]


@dlq.command("list")
def list_letters(
    run: RunName,
    settled: Annotated[
        bool, typer.Option("--all", help="those that were retried or dropped as well")
    ] = False,
    limit: Annotated[int, typer.Option(min=1, max=200, help="how many at most")] = 50,
    before: Annotated[
        int | None, typer.Option(min=1, help="only those with a smaller number")
    ] = None,
    scheduler: SchedulerAddress = "",
    as_json: AsJson = False,
    runs: Runs = RUNS,
) -> None:
    """List letters, newest first."""
    from digenrl.dead_letters import before_list, desk_of, line_of

    state: State = "all" if settled else "open"
    with desk_of(run, runs, scheduler) as desk:
        found, committed = desk.letters(state, limit, before), desk.committed()
    if as_json:
        typer.echo(json.dumps(found, indent=1))
        return
    if said := before_list(found, committed, run):
        typer.echo(said)
    for each in found:
        typer.echo(line_of(each, committed))
    if not found:
        typer.echo("no dead letters")
    elif len(found) == limit:
        typer.echo(f"older ones: --before {found[-1]['number']}")


@dlq.command()
def show(
    run: RunName,
    number: Annotated[int, typer.Argument(min=1, help="number of the letter")],
    scheduler: SchedulerAddress = "",
    as_json: AsJson = False,
    runs: Runs = RUNS,
) -> None:
    """Show all that is known of a letter, what has become of its work, and its bytes."""
    from digenrl.dead_letters import desk_of, outcome_of_letter

    with desk_of(run, runs, scheduler) as desk:
        found, committed = desk.letter(number), desk.committed()
    found["outcome"] = outcome_of_letter(found, committed)
    if as_json:
        typer.echo(json.dumps(found, indent=1))
        return
    found["found"] = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(found["found"]))
    for key, value in found.items():
        if key != "data":
            typer.echo(f"{key}: {value if isinstance(value, str) else json.dumps(value)}")
    typer.echo(f"data: {base64.b64decode(found['data'])!r}")


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
    from digenrl.dead_letters import desk_of, every_open

    if bool(numbers) == every:
        raise UserError("NUMBERS: name letters, or all open ones with --all")
    with desk_of(run, runs, scheduler) as desk:
        said = [_one(desk, each, action) for each in (every_open(desk) if every else numbers)]
    if as_json:
        typer.echo(json.dumps(said, indent=1))
    else:
        for each in said:
            typer.echo(f"{each['number']}: {each['note']}")
        if not said:
            typer.echo("no dead letters")
    if not all(each["done"] for each in said):
        raise typer.Exit(1)


def _one(desk: "Desk", number: int, action: Literal["retry", "drop"]) -> dict[str, object]:
    try:
        return {"number": number, "done": True, "note": desk.settle(number, action)}
    except UserError as error:
        return {"number": number, "done": False, "note": str(error)}
