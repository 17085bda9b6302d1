"""Where the services of a run of `digenrl up` answer, for other commands on this machine."""

from pathlib import Path
from typing import Literal

Service = Literal["scheduler", "page"]


def write_address(folder: Path, url: str, of: Service = "scheduler") -> None:
    """Note the address of a service of the run in ``folder``."""
    (folder / f"{of}.url").write_text(url + "\n")


def address_of(folder: Path, of: Service = "scheduler") -> str:
    """Return the address that it had when the run was started last; empty if it had none."""
    try:
        return (folder / f"{of}.url").read_text().strip()
    except OSError:
        return ""
