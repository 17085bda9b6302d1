"""`digenrl adapter`: LoRA files of other tools."""

from pathlib import Path
from typing import Annotated, Literal

import typer

adapter = typer.Typer(no_args_is_help=True)


@adapter.callback()
def files() -> None:
    """Convert the LoRA of another tool into one that `model.adapter` reads."""


@adapter.command()
def convert(
    source: Annotated[Path, typer.Argument(metavar="IN", help="safetensors file, or its folder")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="safetensors file to create")],
    rank: Annotated[
        int | None, typer.Option(min=1, help="rank of every layer; by default as is")
    ] = None,
    drop: Annotated[Literal["text-encoder"] | None, typer.Option(help="part to leave out")] = None,
) -> None:
    """Give all layers one rank and alpha, leave out text encoders, and rename DiffSynth's layers.

    Example: `digenrl adapter convert sft.safetensors mine.safetensors --rank 32 --drop
    text-encoder`. Each layer changes as before if the rank suffices, else as nearly as it can.
    """
    from shared.diffusion.weights.lora_conversion import convert_lora

    lost = convert_lora(source, out, rank, drops_text=bool(drop))
    typer.echo(out)
    if lost > 1e-6:
        typer.echo(f"of one layer's change, {lost:.1%} does not fit the rank {rank}", err=True)
