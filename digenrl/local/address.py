"""Where the services of a run answer, for other commands on this machine."""

from pathlib import Path
from typing import TYPE_CHECKING, Literal

from digenrl.local.progress import read_progress
from digenrl.local.runs import Run, in_progress
from shared.errors import UserError

if TYPE_CHECKING:
    from digenrl.api.client import Client
    from shared.process.http_access import Role

Service = Literal["scheduler", "page"]


def write_address(folder: Path, url: str, of: Service = "scheduler") -> None:
    """Note the address of a service of the run of `digenrl up` in ``folder``."""
    (folder / f"{of}.url").write_text(url + "\n")


def last_address(folder: Path, of: Service = "scheduler") -> str:
    """Return the address that it had when the run was started last; empty if it had none."""
    try:
        return (folder / f"{of}.url").read_text().strip()
    except OSError:
        return ""


def connect_client(
    run: Run,
    scheduler: str = "",
    token_file: Path | None = None,
    *,
    role: "Role" = "viewer",
    of: Service = "scheduler",
) -> "Client":
    """Return a client of a run: of the address that is given, or of the run of `digenrl up`.

    Args:
        token_file: file with a token; None: DIGENRL_API_TOKEN, or for a run of `digenrl up` the
            token of ``role`` in its folder.

    Raises:
        UserError: if its address is unknown, or the file cannot be read.
    """
    from digenrl.api.checked_client import CheckedClient
    from digenrl.local.secrets.tokens import KEYS

    folder = run.folder
    address = scheduler or (last_address(folder, of) if not run.store_url else "")
    if not address:
        raise UserError(
            f"--scheduler: {run.name} is no run of `digenrl up`; name the address of the run's "
            f"{'page' if of == 'page' else 'scheduler'}"
        )
    now = read_progress(folder)
    if not scheduler and run.is_local and (now.state == "reporting" or not in_progress(folder)):
        from digenrl.local.earlier import resume_hint

        is_over = now.state in ("finished", "reporting")
        more = f"`{run.command('status')}` shows it" if is_over else resume_hint(folder)
        raise UserError(f"RUN: {run.name} is not in progress: {now}; {more}")
    own = folder / KEYS / f"{role}.token"
    if token_file is None and not scheduler and own.is_file():
        token_file = own
    return CheckedClient.at(address, token=_read_token(token_file))


def _read_token(file: Path | None) -> str:
    try:
        return "" if file is None else file.read_text().strip()
    except OSError as error:
        raise UserError(f"--token-file: {file}: {error.strerror}") from error
