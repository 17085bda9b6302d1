"""The command of ``python -m bench`` that photographs every page."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from bench.pictures.shots import Shot


def pictures(
    names: Annotated[
        list[str] | None, typer.Argument(help="pictures whose names begin so; by default all")
    ] = None,
    folder: Annotated[Path, typer.Option(help="for runs and pictures")] = Path("build/pictures"),
    docs: Annotated[
        Path, typer.Option(help="folder of the pictures that the documents show")
    ] = Path("docs/images"),
) -> None:
    """Photograph every page of finished, failed, running and video runs, at two widths, light and
    dark. Needs Chromium and `make test`'s environment."""
    from bench.pictures.album import take, write_docs
    from bench.pictures.runs import make_runs, run_in_progress
    from bench.pictures.shots import live_shots, still_shots

    folder = folder.resolve()
    runs, pages = folder / "runs", folder / "pages"
    runs.mkdir(parents=True, exist_ok=True)
    make_runs(runs)

    def wanted(shots: Sequence["Shot"]) -> list["Shot"]:
        return [each for each in shots if each.name.startswith(tuple(names or [""]))]

    if shots := wanted(still_shots()):
        asyncio.run(take(runs, pages, shots))
    if shots := wanted(live_shots()):
        with run_in_progress(runs):
            asyncio.run(take(runs, pages, shots))
    write_docs(pages, docs)
