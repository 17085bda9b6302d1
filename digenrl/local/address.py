"""Where the scheduler of a run of `digenrl up` answers, for other commands on this machine."""

from pathlib import Path

FILE = "scheduler.url"


def write_address(folder: Path, url: str) -> None:
    """Note the address of the API of the run in ``folder``."""
    (folder / FILE).write_text(url + "\n")


def address_of(folder: Path) -> str:
    """Return the address that the run had when it was started last; empty if it had none."""
    try:
        return (folder / FILE).read_text().strip()
    except OSError:
        return ""
