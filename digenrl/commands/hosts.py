"""`digenrl hosts`: hosts of a lab take part in a run, by systemd and ssh."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from shared.errors import UserError

if TYPE_CHECKING:
    from digenrl.local.hosts.units import HostsFile

hosts = typer.Typer(help="Hosts of a lab: systemd units over ssh.", no_args_is_help=True)

File = Annotated[Path, typer.Option("--file", "-f", help="the hosts of the run: hosts.toml")]
Out = Annotated[Path, typer.Option(help="folder of what is copied to hosts, with all keys")]
Plan = Annotated[bool, typer.Option("--plan", help="print every command, and run none")]
FILE, OUT = Path("hosts.toml"), Path("hosts")


@hosts.command()
def units(file: File = FILE, out: Out = OUT) -> None:
    """Write a unit, its variables and the keys of its roles for each host."""
    for name in _write(file, out).hosts:
        typer.echo(f"{name}: {out / name}")


@hosts.command()
def apply(file: File = FILE, out: Out = OUT, plan: Plan = False) -> None:
    """Copy them to the hosts, and start what is not running as written."""
    from digenrl.local.hosts.units import Shell, apply

    apply(_write(file, out), out, Shell(plan, typer.echo))


@hosts.command()
def status(file: File = FILE, plan: Plan = False) -> None:
    """Print what the unit of each host does."""
    from digenrl.local.hosts.units import Shell, read_hosts, status

    status(read_hosts(file), Shell(plan, typer.echo))


@hosts.command()
def down(file: File = FILE, plan: Plan = False) -> None:
    """Stop the units, and delete them and the keys on all hosts."""
    from digenrl.local.hosts.units import Shell, down, read_hosts

    down(read_hosts(file), Shell(plan, typer.echo))


def _write(file: Path, out: Path) -> "HostsFile":
    from digenrl.local.hosts.units import read_hosts, write_units

    hosts_file = read_hosts(file)
    try:
        write_units(hosts_file, out)
    except OSError as error:
        raise UserError(f"--out: {error.filename}: {error.strerror}; name another") from error
    for role in ("trainer", "reward"):
        if not any(role in table.roles for table in hosts_file.hosts.values()):
            typer.echo(f"no host has the role {role}: the run waits for one", err=True)
    return hosts_file
