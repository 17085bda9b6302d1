"""`digenrl host`: this machine takes part in a run that is elsewhere."""

import os
import threading
from pathlib import Path
from typing import Annotated, Literal

import typer

from digenrl.api.run_logs import read
from digenrl.commands.logs import POLL_S
from digenrl.commands.options import recipe_file
from digenrl.local.limits import MAX_LOG_BYTES, MAX_LOG_TAIL_BYTES
from shared.errors import UserError


def host(
    keys: Annotated[
        Path,
        typer.Option(
            envvar="DIGENRL_KEYS",
            help="folder with hosts.env, and a folder of keys for each role of this host",
        ),
    ],
    roles: Annotated[
        str, typer.Option(help="some of rollout,trainer,reward,encoder; by default those with keys")
    ] = "",
    gpus: Annotated[
        str, typer.Option(envvar="DIGENRL_GPUS", help="such as 0-3 or 0,2; by default all")
    ] = "",
    until: Annotated[
        Literal["finished"] | None,
        typer.Option(help="end when the run is finished; by default stay for more"),
    ] = None,
    at: Annotated[
        str, typer.Option(help="address of this host, which has brokers, scheduler and page")
    ] = "",
    recipe: Annotated[
        Path | None, typer.Option(help="with --at: the run's recipe", callback=recipe_file)
    ] = None,
    run: Annotated[
        str, typer.Option(help="with --at: name of the run; by default the recipe's")
    ] = "",
    logs: Annotated[
        Path | None,
        typer.Option(help="for logs; by default logs, without --at logs/HOST, next to the keys"),
    ] = None,
) -> None:
    """Take part in a run: keep one process per GPU running, until Ctrl-C or the end of the run.

    Exit status 0: the run is finished, or this process was stopped; 2: this host can never take
    part; others: start it again.
    """
    import uvloop

    from digenrl.local.hosts.first_host import FirstHost
    from digenrl.local.hosts.host import HostRequest, host_name, parse_gpus, parse_roles, take_part
    from shared.recipe.recipe import load_recipe
    from shared.telemetry import configure_logs

    chosen, first = parse_roles(roles, "--roles"), None
    if bool(at) != (recipe is not None) or (run and not at):
        raise UserError("--at, --recipe: the first host of a run needs both, others not, nor --run")
    if recipe is not None:
        options = {"run.name": run} if run else {}
        first = FirstHost(at, recipe.resolve(), load_recipe(recipe, options))
    if gpus:
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(parse_gpus(gpus, "--gpus"))
    configure_logs(service="host", worker=host_name(), run=os.environ.get("DIGENRL_RUN", ""))
    folder = logs or keys.resolve().parent / "logs" / ("" if first else host_name())
    request = HostRequest(keys.resolve(), chosen, folder, until is not None, first)
    positions = {path: path.stat().st_size for path in folder.glob("*.log")}
    ended = threading.Event()
    printing = threading.Thread(target=_print_logs, args=(folder, positions, ended))
    printing.start()
    try:
        uvloop.run(take_part(request))
    finally:
        ended.set()
        printing.join()


def _print_logs(folder: Path, positions: dict[Path, int], ended: threading.Event) -> None:
    """Print what this host's processes log, until they have ended; of a long log the newest lines
    are kept, which have the reason if its process ends."""
    is_last = False
    while not is_last:
        is_last = ended.wait(POLL_S)
        for path in sorted(folder.glob("*.log")):
            for line in read(path, positions):
                typer.echo(f"{line.process}: {line.raw}")
            if positions.get(path, 0) > MAX_LOG_BYTES:
                with path.open("a+b") as file:
                    file.seek(positions[path] - MAX_LOG_TAIL_BYTES)
                    newest = file.read()  # with lines that were written meanwhile
                    file.truncate(0)
                    file.write(newest)
                positions[path] = MAX_LOG_TAIL_BYTES
