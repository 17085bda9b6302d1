"""Commands that look back at a run, in progress or over: versions, samples and the audit log."""

import json
import shlex
import time
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from digenrl.commands.options import RUNS, AsJson, RunArgument, Runs, SchedulerAddress, TokenFile
from digenrl.commands.tables import table
from digenrl.local.runs import find_run, runs_folder
from digenrl.reading.wording import visible
from shared.errors import UserError

if TYPE_CHECKING:
    from digenrl.api.models import SampleHistory, SamplePage
    from services.scheduler.shell.api_batches import VersionView

ORDERS = ("worst", "best", "number", "unscored")
Limit = Annotated[int, typer.Option(min=1, max=200, help="how many at most")]
Cursor = Annotated[
    int | None, typer.Option(min=0, help="cursor that the page before has ended with")
]


def versions(
    run: RunArgument = "",
    limit: Limit = 20,
    before: Annotated[int | None, typer.Option(min=0, help="only smaller numbers")] = None,
    scheduler: SchedulerAddress = "",
    token_file: TokenFile = None,
    as_json: AsJson = False,
    runs: Runs = RUNS,
) -> None:
    """List the newest policy versions of a run: how good each is, whether its weights are kept, and
    which workers have loaded it."""
    from digenrl.local.connection import connect

    named = find_run(run, runs, reads=True)
    with connect(named, scheduler, token_file) as connection:
        committed = connection.client.list_versions(limit, before)
    if as_json:
        typer.echo(json.dumps([each.model_dump(mode="json") for each in committed], indent=1))
        return
    table(
        (
            "version", "reward of its batch", "evaluated", "weights", "digest of its weights",
            "loaded now by",
        ),
        [_version_row(each, before) for each, before in zip_longest(committed, committed[1:])],
    )  # fmt: skip
    measure = next((each.evaluated_by for each in committed if each.evaluated_by), None)
    if measure is not None:
        from digenrl.evaluation.best import BEST_RULE

        typer.echo(f"evaluated: {measure}; {BEST_RULE}")
        typer.echo(
            f"`digenrl export {named.name} --version best` takes the best of all, if one is better "
            "than version 0, the model before training"
        )
    if committed and committed[-1].version:
        again = _again("versions", named.name, limit=(limit, 20), before=committed[-1].version)
        typer.echo(f"older ones: {again}{_of_run(scheduler, token_file, runs)}")


def _version_row(each: "VersionView", before: "VersionView | None") -> tuple[str, ...]:
    reward = "" if each.reward_mean is None else f"{each.reward_mean:.3f}"
    digest = each.weights_digest[:12]
    if before is not None and before.weights_digest == each.weights_digest:
        digest += f" as {before.version}"
    mark = " best" if each.version else " best so far: the model before training"
    evaluated = "" if each.evaluated is None else f"{each.evaluated:.3f}{mark * each.is_best}"
    kept = {None: "", True: "kept", False: "deleted"}[each.is_kept]
    return str(each.version), reward, evaluated, kept, digest, ", ".join(each.adopted_by)


def samples(
    run: RunArgument = "",
    batch: Annotated[
        int | None,
        typer.Argument(metavar="[BATCH]", min=0, help="its number; by default the newest"),
    ] = None,
    step: Annotated[
        int | None, typer.Option(min=1, help="optimizer step: step 20 trained batch 19")
    ] = None,
    order: Annotated[str, typer.Option(help=f"one of {', '.join(ORDERS)}")] = "worst",
    limit: Limit = 10,
    after: Cursor = None,
    scheduler: SchedulerAddress = "",
    token_file: TokenFile = None,
    as_json: AsJson = False,
    runs: Runs = RUNS,
) -> None:
    """List samples of a committed batch with rewards and scores; by default of the newest one,
    the worst first. Those without a score come last; `--order unscored` lists them alone.

    Examples: `digenrl samples demo --step 20`, `digenrl samples demo 19 --order best --limit 5`.
    """
    if order not in ORDERS:
        raise UserError(f"--order: {order} is unknown; use one of {', '.join(ORDERS)}")
    from digenrl.local.connection import connect

    named = find_run(run, runs, reads=True)
    with connect(named, scheduler, token_file) as connection:
        number = _chosen(named.name, batch, step, connection.client.get_run().step - 1)
        page = connection.client.list_samples(number, order, limit, _text(after))  # type: ignore[arg-type]
    if as_json:
        typer.echo(page.model_dump_json(indent=1))
        return
    at, where = _step_of(page, batch, step), _of_run(scheduler, token_file, runs)
    if page.unscored and order != "unscored":
        again = _again("samples", named.name, step=at, order="unscored")
        typer.echo(f"{page.said_of_unscored}; to see them: {again}{where}")
    _sample_table(page, order)
    if page.next is not None:
        again = _again("samples", named.name, step=at, order=(order, "worst"), limit=(limit, 10))
        typer.echo(f"more: {again} --after {page.next}{where}")


def _sample_table(page: "SamplePage", order: str) -> None:
    is_sum = any(each.is_sum for each in page.samples)
    scores = "= weights x scores" if is_sum else "scores"
    table(
        ("group/sample", "reward", scores, "advantage", "version", "device", "prompt", "notes"),
        [_sample_row(each) for each in page.samples],
    )
    if page.said_of_weights:
        typer.echo(page.said_of_weights)
    if not page.samples:
        is_whole = order == "unscored" and not page.unscored
        typer.echo("all samples have a score" if is_whole else "there is no such sample")


def _step_of(page: "SamplePage", batch: int | None, step: int | None) -> int | None:
    """Return the step of a page's samples, so that the next page shows the same step."""
    if page.samples:
        return page.samples[0].batch + 1
    return step if batch is None else batch + 1


def _again(command: str, run: str, **options: object) -> str:
    """Return a command as it is typed; of a pair, the second is the default, which is left out."""
    words = ["digenrl", command, run]
    for name, value in options.items():
        value, default = value if isinstance(value, tuple) else (value, None)
        if value != default:
            words += [f"--{name}", str(value)]
    return shlex.join(words)


def _of_run(scheduler: str, token_file: Path | None, runs: Path) -> str:
    """Return the options by which a command finds the same run, as they are typed behind others."""
    words = ["--scheduler", scheduler] if scheduler else []
    words += ["--token-file", str(token_file)] if token_file else []
    words += [] if runs == runs_folder() else ["--runs", str(runs)]
    return f" {shlex.join(words)}" if words else ""


def _sample_row(each: "SampleHistory") -> tuple[str, ...]:
    return (
        f"{each.group}/{each.sample}",
        "none" if each.reward is None else f"{each.reward:.3f}",
        each.made_of, "" if each.advantage is None else f"{each.advantage:+.2f}",
        str(each.policy_version), each.generated_by, each.prompt or "",
        "; ".join(filter(None, [each.why_not, _letters(each.letters)])),
    )  # fmt: skip


def _chosen(run: str, batch: int | None, step: int | None, newest: int) -> int:
    """Return the number of the requested batch: given directly, by its step, or the newest.

    Raises:
        UserError: if both are given, or it is not committed.
    """
    if batch is not None and step is not None:
        raise UserError("BATCH: name a batch, or with --step a step, which trained the one before")
    number = newest if batch is None else batch
    number = number if step is None else step - 1
    if number < 0:
        raise UserError(f"RUN: {run} has no committed batch yet")
    if number > newest:
        raise UserError(
            f"BATCH: batch {batch} is not committed yet; the newest is {newest}" if step is None
            else f"--step: step {step} is not trained yet; the newest is {newest + 1}"
        )  # fmt: skip
    return number


def _text(cursor: int | None) -> str:
    return "" if cursor is None else str(cursor)


def _letters(numbers: list[int]) -> str:
    return f"dead letters {', '.join(map(str, numbers))}" if numbers else ""


def audit(
    run: RunArgument = "",
    limit: Limit = 20,
    after: Cursor = None,
    scheduler: SchedulerAddress = "",
    token_file: TokenFile = None,
    as_json: AsJson = False,
    runs: Runs = RUNS,
) -> None:
    """List who has asked for what: requests that changed something, or were to, newest first."""
    from digenrl.local.connection import connect

    named = find_run(run, runs, reads=True)
    with connect(named, scheduler, token_file) as connection:
        page = connection.client.list_audit(limit, _text(after))
    if as_json:
        typer.echo(page.model_dump_json(indent=1))
        return
    for each in page.requests:
        at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(each.at))
        who = f"{each.caller} for {each.on_behalf}" if each.on_behalf else each.caller
        typer.echo(visible(f"{at}  {who:20} {each.operation}  {each.status}"))
    if not page.requests:
        typer.echo("nobody has asked for anything")
    if page.next is not None:
        again = _again("audit", named.name, limit=(limit, 20), after=page.next)
        typer.echo(f"more: {again}{_of_run(scheduler, token_file, runs)}")
