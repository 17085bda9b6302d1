"""A case with its progress on the screen."""

from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from bench.cluster.case import Case, Finished, run_case
from bench.cluster.session import Session, opened
from services.scheduler.planning.splits import words


async def run_shown(case: Case, folder: Path, console: Console) -> Finished:
    """In a session of its own."""
    async with opened(folder) as session:
        return await run_in(session, case, console)


async def run_in(session: Session, case: Case, console: Console) -> Finished:
    columns = (
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(),
    )  # fmt: skip
    title = f"{case.profile.name}, {words(case.devices)}, scale {case.scale:g}"
    with Progress(*columns, console=console, transient=True) as progress:
        shown = progress.add_task(title, total=case.num_batches)

        def note(mode: str, number: int, version: int) -> None:
            text = f"{title}: {mode}, round {number + 1} of {case.rounds}"
            progress.update(shown, description=text, advance=version > 0)

        return await run_case(session, case, note)
