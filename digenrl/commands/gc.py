"""`digenrl gc`: deletes unneeded objects from a run's folder."""

import asyncio
import json
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from digenrl.commands.options import RUNS, AsJson, RunOption, Runs, RunToChange
from digenrl.local.runs import find_run
from shared.errors import UserError

if TYPE_CHECKING:
    from shared.run.garbage import DeletableObjects


def gc(
    name: RunToChange = "",
    run: RunOption = "",
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="list deletable objects, and delete nothing")
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", help="delete without asking")] = False,
    hours: Annotated[
        float | None,
        typer.Option(
            min=0,
            help="age of what is deleted; by default 24, and 0 for a run of `digenrl up`, which "
            "nothing stores into meanwhile",
        ),
    ] = None,
    as_json: AsJson = False,
    runs: Runs = RUNS,
) -> None:
    """Delete a run's objects that no commit, no open batch and no evaluation names, and versions
    that are not kept."""
    from digenrl.local.store import run_store
    from shared.limits import SAFE_AGE_S
    from shared.run.garbage import delete_garbage, find_garbage

    chosen = find_run(name or run, runs)
    with run_store(chosen) as store:
        by_default = 0.0 if chosen.is_local else SAFE_AGE_S
        age = by_default if hours is None else 3600 * hours
        garbage = asyncio.run(find_garbage(store, chosen.id, now=time.time(), min_age=age))
        if not as_json:
            _show(garbage)
        if not garbage or dry_run or not (yes or _agreed()):
            _say(garbage, None, as_json=as_json)
            return

        async def delete() -> int:
            return sum([await delete_garbage(store, each) for each in garbage])

        _say(garbage, asyncio.run(delete()), as_json=as_json)


def _show(garbage: "Sequence[DeletableObjects]") -> None:
    for each in garbage:
        typer.echo(f"{len(each.found):8d} objects {size(each.num_bytes):>10}  {each.kind}")


def _say(garbage: "Sequence[DeletableObjects]", deleted: int | None, *, as_json: bool) -> None:
    """Report the deleted objects; None: nothing was to be deleted."""
    if as_json:
        kinds = [
            {"kind": each.kind, "objects": len(each.found), "bytes": each.num_bytes}
            for each in garbage
        ]
        typer.echo(json.dumps({"found": kinds, "deleted": deleted or 0}, indent=1))
    elif not garbage:
        typer.echo("nothing to delete")
    else:
        typer.echo("nothing was deleted" if deleted is None else f"deleted {deleted} objects")


def _agreed() -> bool:
    """Ask for confirmation; raises UserError without a terminal."""
    if not sys.stdin.isatty():
        raise UserError("--yes: needed without a terminal; --dry-run only lists")
    return typer.confirm("delete them?")


def size(num_bytes: int) -> str:
    """Return a number of bytes for people.

    >>> [size(each) for each in (0, 999, 1536, 5 << 30)]
    ['0 B', '999 B', '1.5 KiB', '5.0 GiB']
    """
    number, units = float(num_bytes), ("B", "KiB", "MiB", "GiB", "TiB")
    for unit in units:
        if number < 1024 or unit == units[-1]:
            break
        number /= 1024
    return f"{number:.0f} B" if unit == "B" else f"{number:.1f} {unit}"
