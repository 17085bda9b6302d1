"""What a case has found: tables for people, JSON for programs, pictures for both."""

from collections.abc import Mapping
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from bench.cluster.case import Case, Finished, run_case
from bench.cluster.results import CaseResult, ModeResult
from bench.cluster.session import opened
from bench.runner.session import Session
from services.scheduler.costs.split import words


def show_case(result: CaseResult, console: Console) -> None:
    console.print(
        f"{result.workload}, {words(result.devices)}, scale {result.scale:g}: bound "
        f"{result.floor_seconds:.1f} s; models of colocated systems: 2026-06 "
        f"{result.colocated_2026_06:.1f} s, tuned {result.colocated_tuned:.1f} s",
        highlight=False,
    )
    console.print(_times(result))
    console.print(_control(result))


def _times(result: CaseResult) -> Table:
    table = Table(title="seconds per batch, at full scale")
    columns = (
        "mode", "split", "fragment", "measured s", "rounds", "balanced s", "utilisation",
        "simulated s",
        "deviation", "vs 2026-06 (model)", "vs tuned (model)", "vs own colocated",
    )  # fmt: skip
    for column in columns:
        table.add_column(column, justify="left" if column in ("mode", "split") else "right")
    for mode in result.modes:
        own = "" if mode.over_colocated is None else f"{mode.over_colocated:.2f}"
        table.add_row(
            mode.mode, mode.split, str(mode.fragment_size), f"{mode.step_seconds:.2f}",
            f"{mode.fastest:.2f}-{mode.slowest:.2f}", f"{mode.balanced_seconds:.2f}",
            f"{mode.utilisation:.3f}",
            f"{mode.simulated_seconds:.2f}", f"{mode.deviation:+.1%}", f"{mode.over_2026_06:.2f}",
            f"{mode.over_tuned:.2f}", own,
        )  # fmt: skip
    return table


def _control(result: CaseResult) -> Table:
    table = Table(title="control, and where devices wait")
    columns = (
        "mode", "overhead ms/batch", "of a real batch", "messages/batch", "messages/s",
        "cores by process", "rollout", "trainer", "sleeps +ms",
    )  # fmt: skip
    for column in columns:
        table.add_column(column)
    for mode in result.modes:
        table.add_row(
            mode.mode, f"{mode.overhead_ms:.0f}", f"{mode.overhead_share:.2%}",
            f"{sum(mode.messages.values()):.0f}", f"{mode.messages_per_second:.0f}",
            _listed(mode.cpu), _pool(mode, "rollout"), _pool(mode, "trainer"),
            f"{mode.overshoot_ms:.2f}",
        )  # fmt: skip
    return table


def _pool(mode: ModeResult, role: str) -> str:
    lines = [_listed(mode.shares.get(role, {})), _listed(mode.waits.get(role, {}))]
    return "\n".join(line for line in lines if line)


def _listed(shares: Mapping[str, float]) -> str:
    """Lists the largest first, without what is next to nothing."""
    found = sorted(shares.items(), key=lambda item: -item[1])
    return ", ".join(f"{name} {share:.2f}" for name, share in found if share >= 0.005)


def draw(finished: Finished, folder: Path) -> None:
    """Draws the bars of all modes, and a timeline of two batches of each."""
    from bench.runner.plots import Bar, bars, timeline

    result, runs = finished.result, finished.runs
    name = (
        f"{result.workload}-{words(result.devices)}".lower().replace(" + ", "-").replace(" ", "-")
    )
    given = [
        Bar(mode.mode, mode.step_seconds, mode.fastest, mode.slowest, mode.simulated_seconds)
        for mode in result.modes
    ]
    bounds = {
        "bound": result.floor_seconds,
        "colocated 2026-06 (model)": result.colocated_2026_06,
        "colocated tuned (model)": result.colocated_tuned,
    }
    title = f"{result.workload} on {words(result.devices)}, emulated at 1:{result.scale:g}"
    bars(folder / f"{name}-steps.png", title, given, bounds=bounds)
    for mode, run in runs.items():
        last = len(run.commits) - 1
        versions = range(max(0, last - 2), last + 1)
        timeline(
            folder / f"{name}-{mode}.png",
            f"{title}: {mode}, two batches",
            run.intervals,
            begin=run.commits[versions[0]],
            end=run.commits[last],
            marks={f"version {version}": run.commits[version] for version in versions},
            seconds_per_second=result.scale,
        )


async def run_shown(case: Case, folder: Path, console: Console) -> Finished:
    """Runs a case in a session of its own."""
    async with opened(folder) as session:
        return await run_in(session, case, console)


async def run_in(session: Session, case: Case, console: Console) -> Finished:
    """Runs a case with its progress on the screen."""
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
