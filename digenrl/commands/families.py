"""`digenrl families`: which model families can be trained."""

import typer

from digenrl.commands.options import AsJson


def families(as_json: AsJson = False) -> None:
    """List the model families that can be trained, and the packages that bring them."""
    from digenrl.local.checking.available import listed_families, shown

    typer.echo(shown(listed_families(), as_json=as_json))
