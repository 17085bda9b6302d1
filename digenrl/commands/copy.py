"""`digenrl copy`: a run to another store: a backup, its way back, or a move."""

import asyncio
import re
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from digenrl.commands.gc import size
from digenrl.commands.options import RUNS, RunName, Runs
from digenrl.local.limits import COPY_PROGRESS_S
from digenrl.local.runs import RECIPE_JSON, Run, RunProgress, find_run
from shared.errors import Unavailable, UserError

if TYPE_CHECKING:
    from shared.run.run_copy import RunCopy


def copy(
    run: RunName,
    store: Annotated[
        str,
        typer.Argument(
            metavar="STORE",
            help="a folder, or a bucket (s3://bucket/prefix); `runs` makes a run of `digenrl up`",
        ),
    ],
    runs: Runs = RUNS,
) -> None:
    """Copy a run to another store, also while it is in progress: a backup, its way back, or a move.
    Typed again, it continues after an interruption, and sends what is new.

    Examples: `digenrl copy demo /mnt/backup`, `digenrl copy /mnt/backup/demo runs`.
    """
    from digenrl.local.start import resume_hint
    from digenrl.local.store import run_store
    from shared.process.settings import ServiceSettings
    from shared.run.run_copy import RunCopy
    from shared.store import open_store

    chosen = find_run(run, runs)
    is_local = Path(store).resolve() == runs.resolve()
    _check_target(store, chosen)
    url = store if "://" in store else Path(store).absolute().as_uri()
    given = ServiceSettings(run=chosen.id, store_url=url).store
    folder = runs / chosen.id
    if is_local and chosen.is_local and chosen.folder.resolve() == folder.resolve():
        raise UserError(f"STORE: {chosen.name} is in {runs} already; name another store")
    try:
        with run_store(chosen, reads=True) as source:
            if is_local:
                (folder / "logs").mkdir(parents=True, exist_ok=True)
            restored = Run(chosen.id, chosen.id, folder, is_local=True)
            with run_store(restored) if is_local else nullcontext(open_store(given)) as target:
                copying = RunCopy(source, target, chosen.id)
                version = asyncio.run(_with_progress(copying))
                if is_local:
                    asyncio.run(_write_start(copying, folder, version))
    except (Unavailable, OSError) as error:
        raise UserError(f"{error}; the same command continues the copy") from error
    typer.echo(
        f"{chosen.id}: version {version} is in {store}, verified: {size(copying.done_bytes)}, of "
        f"which {size(copying.sent_bytes)} were sent"
    )
    if is_local:
        typer.echo(resume_hint(folder))


def _check_target(store: str, run: Run) -> None:
    """Raises UserError if a store has no name, or is the store or a folder of the run itself."""
    if not store or re.match(r"[A-Za-z0-9]+:/(?!/)", store):
        raise UserError(f"STORE: {store!r} is neither a folder nor a bucket (s3://bucket/prefix)")
    path = store if "://" in store else Path(store).resolve().as_uri()
    folder = f"{run.store_url}/{run.id}" if run.store_url else run.folder.resolve().as_uri()
    if path.rstrip("/") == run.store_url.rstrip("/") or f"{path}/".startswith(f"{folder}/"):
        raise UserError(f"STORE: {store} has the run itself; name another store")


async def _with_progress(copying: "RunCopy") -> int:
    task = asyncio.create_task(copying.copy())
    while not (await asyncio.wait({task}, timeout=COPY_PROGRESS_S))[0]:
        done, whole = size(copying.done_bytes), size(copying.num_bytes)
        typer.echo(f"{done} of {whole}, {size(copying.sent_bytes)} sent", err=True)
    return task.result()


async def _write_start(copying: "RunCopy", folder: Path, version: int) -> None:
    """Write what `digenrl up` needs to continue the run."""
    from digenrl.local.start import FILES_JSON, RECORDS
    from shared.run.files import stored_records
    from shared.run.run_recipe import FILES, needed_recipe

    recipe = await needed_recipe(copying.target, copying.run)
    records = await stored_records(copying.target, recipe, FILES)
    (folder / FILES_JSON).write_bytes(RECORDS.dump_json(records, indent=1))
    RunProgress("interrupted", version, recipe.run.steps).write(folder)
    (folder / RECIPE_JSON).write_text(recipe.model_dump_json(indent=1))
