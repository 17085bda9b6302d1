"""Writes each optimizer step of a run once to TensorBoard or Weights & Biases, or as lines.

The process reads commit records and evaluations from the object store and needs no service. It may
be stopped and restarted at any time: each writer reads its position from its previous output.

    object store                     this process                      a folder, or a service
    commits/00000004.json  --------> step 4, if it is missing  ------> an event with all its values
"""

import asyncio
import json
import signal
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Protocol

import structlog
import typer

from digenrl.api.feed import commit_fields, evaluation_fields
from digenrl.follow.panels import AnnouncedEvaluations, FinishedEvaluation, Panel, panel_of
from shared.errors import IntegrityError, Unavailable, UserError, how_to_install
from shared.process.settings import ServiceSettings
from shared.recipe.recipe import Recipe
from shared.run.commits import CommitRecord, read_commit, stored_digest
from shared.run.log import Log
from shared.run.run_recipe import needed_recipe, read_recipe
from shared.store import ObjectStore, open_store

POLL_S = 1.0

log = structlog.get_logger()


class MetricWriter(Protocol):
    next_step: int
    """First step that is not written yet; steps count from 1."""

    def write(self, record: CommitRecord) -> None:
        """Write the metrics of a step; steps come in order."""

    def needs(self, finished: FinishedEvaluation) -> bool:
        """Return whether the picture of an evaluation is missing.

        The step of the evaluated version has already been written."""

    def show(self, finished: FinishedEvaluation, panel: Panel) -> None:
        """Write the picture of an evaluation."""

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class MetricTargets:
    """Destinations of metrics."""

    tensorboard: Path | None = None
    """Folder that contains one folder per run."""
    wandb: str | None = None
    """Project of Weights & Biases."""
    lines: bool = False
    """Whether to write lines of JSON to stdout."""

    def __bool__(self) -> bool:
        return self.tensorboard is not None or self.wandb is not None or self.lines


@dataclass(frozen=True, slots=True)
class RunStarted:
    """A run that has its first commit record."""

    recipe: Recipe
    first_digest: str
    """Digest of the run's first commit record."""

    @property
    def label(self) -> str:
        """The run's name with a suffix that distinguishes runs of the same name."""
        return f"{self.recipe.run.name}-{self.first_digest[:8]}"


def check_installed(targets: MetricTargets) -> None:
    """Raises UserError, naming the extra to install, if a writer's package is missing."""
    for extra in ("tensorboard", "wandb"):
        if getattr(targets, extra) is None:
            continue
        try:
            import_module(f"digenrl.follow.{extra}")
        except ImportError as error:
            raise UserError(f"--{extra} {how_to_install(extra)} ({error})") from error


async def follow(settings: ServiceSettings, targets: MetricTargets, *, once: bool = False) -> None:
    """Write committed steps until SIGINT or SIGTERM; with ``once``, only those committed so far.

    Raises:
        UserError: if no target is given, or with ``once``, if there is no run.
    """
    if not targets:
        raise UserError(
            "--tensorboard, --wandb: name a folder or a project to write to, or use --json"
        )
    check_installed(targets)
    store = open_store(settings.store)
    with _stop_signals() as stop:
        if once:
            stop.set()
        started = await _wait_for_start(store, settings.run, stop)
        if started is None:
            if once:
                await needed_recipe(store, settings.run)
                raise UserError(f"--run: {settings.run} has no version yet")
            return
        with ExitStack() as stack:
            writers = _open(targets, started)
            for writer in writers:
                stack.callback(writer.close)
                log.info("following", label=started.label, next_step=writer.next_step)
            await _follow(store, settings.run, writers, stop)


async def _wait_for_start(store: ObjectStore, run: str, stop: asyncio.Event) -> RunStarted | None:
    """Wait until the run has started; returns None if a stop signal arrives before."""
    while True:
        last_look = stop.is_set()
        try:
            recipe = await read_recipe(store, run)
            if recipe is not None and await read_commit(store, run, 0) is not None:
                return RunStarted(recipe, await stored_digest(store, run, 0))
        except Unavailable as error:
            log.warning("store_unavailable", error=str(error))
        if last_look:
            return None
        await _pause(stop)


async def _follow(
    store: ObjectStore, run: str, writers: Sequence[MetricWriter], stop: asyncio.Event
) -> None:
    announced = AnnouncedEvaluations(store, run, Log.of_evaluations(store, run))
    while True:
        # Read the flag first: steps committed before the stop signal are still written.
        last_look = stop.is_set()
        try:
            await _write_new(store, run, writers)
            await _show_new(store, announced, writers)
        except Unavailable as error:
            log.warning("store_unavailable", error=str(error))
        if last_look:
            return
        await _pause(stop)


async def _write_new(store: ObjectStore, run: str, writers: Sequence[MetricWriter]) -> None:
    step = min(writer.next_step for writer in writers)
    while (record := await read_commit(store, run, step)) is not None:
        for writer in writers:
            if writer.next_step == step:
                writer.write(record)
        step += 1


async def _show_new(
    store: ObjectStore, announced: AnnouncedEvaluations, writers: Sequence[MetricWriter]
) -> None:
    written = min(writer.next_step for writer in writers) - 1
    while (finished := await announced.next(written)) is not None:
        missing = [writer for writer in writers if writer.needs(finished)]
        try:
            panel = await panel_of(store, finished.record) if missing else None
        except IntegrityError as error:
            log.warning("panel_without_pictures", version=finished.record.version, why=str(error))
            continue
        if panel is not None:
            for writer in missing:
                writer.show(finished, panel)


class MetricLines:
    """Writes lines of JSON to stdout, in the format of `/v1/events`, from step 1 on."""

    def __init__(self) -> None:
        self.next_step = 1

    def write(self, record: CommitRecord) -> None:
        typer.echo(json.dumps({"event": "commit", "data": commit_fields(record)}))
        self.next_step = record.policy.version + 1

    def needs(self, finished: FinishedEvaluation) -> bool:
        """Write the figures of an evaluation; lines have no pictures."""
        fields = evaluation_fields(finished.entry)
        typer.echo(json.dumps({"event": "evaluation", "data": fields}))
        return False

    def show(self, finished: FinishedEvaluation, panel: Panel) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing: lines are not buffered."""


def _open(targets: MetricTargets, started: RunStarted) -> list[MetricWriter]:
    writers: list[MetricWriter] = []
    if targets.tensorboard is not None:
        from digenrl.follow.tensorboard import TensorBoard

        writers.append(TensorBoard(targets.tensorboard / started.label))
    if targets.wandb is not None:
        from digenrl.follow.wandb import WeightsAndBiases

        writers.append(WeightsAndBiases(targets.wandb, started.label, started.recipe))
    if targets.lines:
        writers.append(MetricLines())
    return writers


async def _pause(stop: asyncio.Event) -> None:
    try:
        await asyncio.wait_for(stop.wait(), POLL_S)
    except TimeoutError:
        return


@contextmanager
def _stop_signals() -> Iterator[asyncio.Event]:
    event, loop = asyncio.Event(), asyncio.get_running_loop()
    for signum in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(signum, event.set)
    try:
        yield event
    finally:
        for signum in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(signum)
