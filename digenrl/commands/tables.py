"""Prints rows of words as a table, for commands that people read."""

from collections.abc import Sequence

import typer

from digenrl.reading.wording import visible


def table(names: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print rows below the names of their columns; nothing if there is no row."""
    if not rows:
        return
    lines = [names, *([visible(cell) for cell in row] for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(names))]
    for line in lines:
        cells = (cell.ljust(width) for cell, width in zip(line, widths, strict=True))
        typer.echo("  ".join(cells).rstrip())
