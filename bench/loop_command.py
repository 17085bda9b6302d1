"""`python -m bench loop`: the command line; what it does is imported when it is asked for."""

from pathlib import Path
from typing import Annotated

import typer

PLAIN_ROWS = 9
"""Samples of a pass of the plain loop, in sampling and training: what Flow-GRPO's published
configuration of SD3.5-M takes, of 24 per prompt."""


def command(
    recipe: Annotated[Path, typer.Argument(help="for its model, sampling and batch")],
    rounds: Annotated[int, typer.Option(min=1, help="of each, by turns")] = 9,
    groups: Annotated[int, typer.Option(min=1, help="of each round")] = 4,
    plain_rows: Annotated[
        int, typer.Option(min=1, help="samples per pass of the plain loop")
    ] = PLAIN_ROWS,
    json_file: Annotated[Path | None, typer.Option("--json", help="write figures here")] = None,
) -> None:
    """Compare our rollout and trainer with a plain loop that trains step by step."""
    import json
    from dataclasses import asdict
    from statistics import median

    from rich.console import Console
    from rich.table import Table

    from bench.loop import compare
    from shared.recipe.recipe import load_recipe, override

    # The plain loop has no KL term, and the policy gradient is what both are known for.
    changes = {"algorithm.name": "flow-grpo", "algorithm.kl_beta": 0.0}
    found = compare(override(load_recipe(recipe), changes), rounds, groups, plain_rows)
    table = Table("samples per second", "plain loop", "ours", "ratio")
    for name, plain, ours, ratio in (
        ("rollout", found.plain_rollout, found.rollout, found.rollout_ratio),
        ("trainer", found.plain_trainer, found.trainer, found.trainer_ratio),
    ):
        table.add_row(name, f"{median(plain):.0f}", f"{median(ours):.0f}", f"{ratio:.2f}")
    Console().print(table)
    if json_file is not None:
        ratios = {"rollout_ratio": found.rollout_ratio, "trainer_ratio": found.trainer_ratio}
        json_file.write_text(json.dumps({**ratios, **asdict(found)}, indent=1))
