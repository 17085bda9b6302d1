"""The options of `python -m bench two-devices`; what it does is imported when it is called."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer


class PartName(StrEnum):
    equal = "equal"
    slowed = "slowed"
    trainer_bound = "trainer-bound"


def command(
    recipe: Annotated[Path, typer.Argument(help="for its model family, prompts and rewards")],
    part: Annotated[
        list[PartName] | None, typer.Option(help="which part; equal and slowed if none is named")
    ] = None,
    mode: Annotated[
        list[str] | None, typer.Option(help="only this mode, as the table names it; repeatable")
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="runs of each mode")] = 3,
    batches: Annotated[int, typer.Option(min=1, help="of each run that are measured")] = 3,
    slowdown: Annotated[float, typer.Option(min=1, help="of the slowed device")] = 3.0,
    quick: Annotated[
        bool, typer.Option("--quick", help="one round of few modes and small batches")
    ] = False,
    json_file: Annotated[Path | None, typer.Option("--json", help="write figures here")] = None,
    plot: Annotated[Path | None, typer.Option(help="draw bars and timelines here")] = None,
    folder: Annotated[Path, typer.Option(help="for the model and the logs")] = Path(
        "runs/bench-two-devices"
    ),
) -> None:
    """Measure what each scheduling technique gains on two CPU cores, each one device."""
    from bench.two_devices.program import Wanted, measure

    measure(
        Wanted(
            recipe=recipe,
            parts=tuple(name.value for name in part or (PartName.equal, PartName.slowed)),
            modes=tuple(mode or ()),
            rounds=rounds,
            batches=batches,
            slowdown=slowdown,
            quick=quick,
        ),
        folder.resolve(),
        json_file=json_file,
        plots=plot,
    )
