"""`digenrl rewards` and `digenrl families`: what a recipe may name here, ours and of packages."""

import typer

from digenrl.commands.options import AsJson


def rewards(as_json: AsJson = False) -> None:
    """List the types of scorers that a recipe may name, and the packages that bring them."""
    from digenrl.local.listed import listed_rewards, shown

    typer.echo(shown(listed_rewards(), as_json=as_json))


def families(as_json: AsJson = False) -> None:
    """List the model families that can be trained, and the packages that bring them."""
    from digenrl.local.listed import listed_families, shown

    typer.echo(shown(listed_families(), as_json=as_json))
