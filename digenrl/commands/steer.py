"""Commands that look at a run in progress and steer it: workers, TAG, pause, resume and stop."""

import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from digenrl.commands import options
from digenrl.commands.tables import table
from digenrl.local.runs import Run, find_run
from shared.errors import UserError

if TYPE_CHECKING:
    from digenrl.api.client import Client
    from services.scheduler.shell.api_models import RunView, TagView, WorkerView
    from shared.messages.contracts import Action

POLL_S = 0.5
ACCEPTED_S = 5.0
"""Seconds in which an accepted request is carried out."""


def workers(
    run: options.RunArgument = "",
    names: Annotated[list[str] | None, typer.Argument(help="only these workers")] = None,
    host: Annotated[str, typer.Option(help="only the workers of this host")] = "",
    drain: Annotated[
        bool, typer.Option("--drain", help="give them nothing new; what they have, they finish")
    ] = False,
    undrain: Annotated[bool, typer.Option("--undrain", help="give them work again")] = False,
    wait: Annotated[
        bool, typer.Option(help="with --drain: return once they have no work any more")
    ] = True,
    scheduler: options.SchedulerAddress = "",
    token_file: options.TokenFile = None,
    as_json: options.AsJson = False,
    runs: options.Runs = options.RUNS,
) -> None:
    """List the workers of a run in progress; drain some, or a whole host, or give them work again.

    Examples: `digenrl workers demo`, `digenrl workers demo rollout-3 --drain`, `digenrl workers
    demo --host node7 --drain`. Ends with 1 if a worker cannot be drained; Ctrl-C ends the waiting,
    and not the request.
    """
    from digenrl.local.connection import connect_client

    if drain and undrain:
        raise UserError("--undrain: not together with --drain")
    if (drain or undrain) and not names and not host:
        raise UserError("NAMES: name workers, or a host with --host")
    role: Literal["operator", "viewer"] = "operator" if drain or undrain else "viewer"
    named = find_run(run, runs, reads=not (drain or undrain))
    with connect_client(named, scheduler, token_file, role=role) as client:
        chosen_workers = _chosen(client.list_workers(), names or [], host)
        if not (drain or undrain):
            _show(chosen_workers, as_json=as_json)
            return
        views = [
            _told(client.drain_worker, each.worker, "it finishes what it has, and gets nothing new")
            if drain else _told(client.undrain_worker, each.worker, "it gets work again")
            for each in chosen_workers
        ]  # fmt: skip
        lines = [] if as_json else [f"{each['worker']}: {each['note']}" for each in views]
        typer.echo("\n".join(lines), nl=bool(lines))
        if drain and wait:
            lines = until_drained(client, [str(each["worker"]) for each in views if each["done"]])
            typer.echo("\n".join(lines), nl=bool(lines), err=as_json)
    if as_json:
        typer.echo(json.dumps(views, indent=1))
    if not all(each["done"] for each in views):
        raise typer.Exit(1)


def until_drained(client: "Client", names: Sequence[str]) -> list[str]:
    """Return a line for each of these workers once it has no work, is gone, or was given work
    again."""
    before: list[str] = []
    requested_at = time.monotonic()
    while True:
        drain = {each.worker: each.drain for each in client.list_workers() if each.worker in names}
        is_heard = time.monotonic() > requested_at + ACCEPTED_S
        under_way = {"draining"} if is_heard else {"draining", "no"}
        left = [name for name in names if drain.get(name) in under_way]
        if not left:
            became = {"drained": "drained, has no work", "no": "was given work again meanwhile"}
            return [f"{name}: {became.get(drain.get(name, ''), 'is gone')}" for name in names]
        if left != before:
            have = "has" if len(left) == 1 else "have"
            typer.echo(f"waits until {', '.join(left)} {have} finished", err=True)
            before = left
        time.sleep(POLL_S)


def _told(ask: Callable[[str], object], worker: str, note: str) -> dict[str, object]:
    from digenrl.api.client import Refused

    try:
        ask(worker)
    except Refused as refused:
        return {"worker": worker, "done": False, "note": str(refused)}
    return {"worker": worker, "done": True, "note": note}


def _chosen(workers: "list[WorkerView]", names: list[str], host: str) -> "list[WorkerView]":
    names_of_workers = {each.worker for each in workers}
    unknown = [name for name in names if name not in names_of_workers]
    if unknown and unknown[0] in {each.host for each in workers}:
        raise UserError(f"NAMES: {unknown[0]} is a host: write --host {unknown[0]}")
    if unknown:
        raise UserError(
            f"NAMES: {unknown[0]} is unknown; use some of {', '.join(sorted(names_of_workers))}"
        )
    chosen = [
        each for each in workers
        if (not names or each.worker in names) and (not host or each.host == host)
    ]  # fmt: skip
    if host and not chosen:
        hosts = sorted({each.host for each in workers})
        raise UserError(f"--host: {host} is unknown; use one of {', '.join(hosts)}")
    return chosen


def _show(workers: "list[WorkerView]", *, as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps([each.model_dump(mode="json") for each in workers], indent=1))
        return
    names = ("worker", "service", "host", "version", "done", "s per sample", "does")
    table(names, [_row(each) for each in workers])
    if not workers:
        typer.echo("no workers")


def _row(worker: "WorkerView") -> tuple[str, ...]:
    from digenrl.reading.wording import describe_work, figure

    version = "" if worker.policy_version is None else str(worker.policy_version)
    pace = "" if worker.seconds_per_sample is None else figure(worker.seconds_per_sample)
    done, does = str(worker.num_done), describe_work(worker)
    return worker.worker, worker.service, worker.host, version, done, pace, does


def tag(
    run: options.RunArgument = "",
    mode: Annotated[
        str, typer.Argument(help="auto, off, or how many groups members generate; or nothing")
    ] = "",
    scheduler: options.SchedulerAddress = "",
    token_file: options.TokenFile = None,
    as_json: options.AsJson = False,
    runs: options.Runs = options.RUNS,
) -> None:
    """Show the decisions and gains of trainer-assisted generation; or set how much it helps.

    Examples: `digenrl tag demo`, `digenrl tag demo off`, `digenrl tag demo 3`.
    """
    from digenrl.local.connection import connect_client

    role: Literal["operator", "viewer"] = "operator" if mode else "viewer"
    named = find_run(run, runs, reads=True)
    with connect_client(named, scheduler, token_file, role=role) as client:
        if mode in ("auto", "off"):
            client.set_tag(mode)  # type: ignore[arg-type]
        elif mode.isdecimal():
            client.set_tag("fixed", int(mode))
        elif mode:
            raise UserError(f"MODE: {mode!r} is unknown; use auto, off or a number of groups")
        shown = client.get_tag()
    typer.echo(shown.model_dump_json(indent=1) if as_json else "\n".join(_tag_lines(shown, mode)))


def _tag_lines(tag: "TagView", request: str) -> list[str]:
    if request:
        return [f"asked for: {request}; from the next batch on, off at once"]
    chosen = f"{tag.mode}, {tag.groups} groups" if tag.mode == "fixed" else tag.mode
    lines = [f"mode {chosen}; {tag.lent} of {tag.members} members lent"]
    for each in tag.decisions:
        gains = (
            f"{name} {gain:+.1%}" for name, gain in
            (("predicted", each.predicted_gain), ("measured", each.measured_gain))
            if gain is not None
        )  # fmt: skip
        lines.append(f"batch {each.batch}: {each.groups} groups ({each.reason}) {', '.join(gains)}")
    return lines


def add_actions(app: typer.Typer) -> None:
    """Add `pause`, `resume` and `stop`."""

    @app.command()
    def pause(
        run: options.RunName,
        at_failure: Annotated[
            bool, typer.Option("--at-failure", help="as soon as an attempt fails, not at once")
        ] = False,
        scheduler: options.SchedulerAddress = "",
        token_file: options.TokenFile = None,
        as_json: options.AsJson = False,
        runs: options.Runs = options.RUNS,
    ) -> None:
        """Issue no further fragments of a run; what is begun is finished. Failed work waits until
        the run is resumed, so that the cause can be fixed and the work retried.

        With --at-failure it waits until the run is paused, and shows why: `digenrl pause demo
        --at-failure`, then fix it, then `digenrl dlq retry demo --all --resume`. Ctrl-C ends the
        waiting, and not the request.
        """
        action: Action = "pause_at_failure" if at_failure else "pause"
        target = find_run(run, runs)
        _ask(action, target, scheduler, token_file, as_json)
        if at_failure and not as_json:
            _wait_for_failure(target, scheduler, token_file)

    def add(action: "Action", what: str) -> None:
        @app.command(action, help=what)
        def act(
            run: options.RunName,
            scheduler: options.SchedulerAddress = "",
            token_file: options.TokenFile = None,
            as_json: options.AsJson = False,
            runs: options.Runs = options.RUNS,
        ) -> None:
            _ask(action, find_run(run, runs), scheduler, token_file, as_json)

    add("resume", "Go on with a run that was paused or has failed, while its services are there.")
    add("stop", "End a run where it is; `digenrl up RECIPE --resume` goes on with it.")


def _ask(
    action: "Action", run: Run, scheduler: str, token_file: Path | None, as_json: bool
) -> None:
    from digenrl.local.connection import connect_client

    with connect_client(run, scheduler, token_file, role="operator") as client:
        view = {
            "pause": client.pause_run, "pause_at_failure": client.pause_at_failure_run,
            "resume": client.resume_run, "stop": client.stop_run,
        }[action]()  # fmt: skip
    text = f"{run.name}: {action.replace('_', ' ')} is asked for"
    typer.echo(view.model_dump_json(indent=1) if as_json else text)


def _wait_for_failure(run: Run, scheduler: str, token_file: Path | None) -> None:
    """Wait until the run is paused after a failure, and show the failure and the remedy."""
    from digenrl.commands.dlq import all_letters
    from digenrl.local.connection import connect_client
    from digenrl.reading.letters import summary

    with connect_client(run, scheduler, token_file, role="operator") as client:
        now = until_paused(client)
        typer.echo(f"{run.name}: {now.phase}")
        if now.phase == "paused":
            for line in summary(all_letters(client, "open"), now):
                typer.echo(line)


def until_paused(client: "Client") -> "RunView":
    """Return once the run is not running any more, or its pause at a failure was cancelled."""
    before = -1
    while True:
        run = client.get_run()
        if run.phase != "running" or not run.pause_at_failure:
            return run
        if run.step != before:
            typer.echo(f"step {run.step} of {run.steps}; waits until something fails", err=True)
            before = run.step
        time.sleep(POLL_S)
