"""Writes each optimizer step of a run once to TensorBoard or Weights & Biases, or as lines.

It reads only commit records and evaluations, as they appear: no service knows of it, and it may
end and start at any time. Each writer finds its position in what it has written.

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
        """Return whether the picture of an evaluation is missing; its version is written."""

    def show(self, finished: FinishedEvaluation, panel: Panel) -> None:
        """Write the picture of an evaluation."""

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class MetricTargets:
    """Destinations of metrics."""

    tensorboard: Path | None = None
    """Folder in which each run gets a folder of its own."""
    wandb: str | None = None
    """Project of Weights & Biases."""
    lines: bool = False
    """Whether to write lines of JSON to stdout."""

    def __bool__(self) -> bool:
        return self.tensorboard is not None or self.wandb is not None or self.lines


@dataclass(frozen=True, slots=True)
class RunStarted:
    """Describes a run that has begun."""

    recipe: Recipe
    first: str
    """Digest of its first commit record."""

    @property
    def label(self) -> str:
        """The run's name, and digits that distinguish it from other runs of the same name."""
        return f"{self.recipe.run.name}-{self.first[:8]}"


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
            "--tensorboard, --wandb: name a folder, or a project, to write to; or --json"
        )
    check_installed(targets)
    store = open_store(settings.store)
    with _told_to_end() as ended:
        if once:
            ended.set()
        began = await _began(store, settings.run, ended)
        if began is None:
            if once:
                await needed_recipe(store, settings.run)
                raise UserError(f"--run: {settings.run} has no version yet")
            return
        with ExitStack() as stack:
            writers = _open(targets, began)
            for writer in writers:
                stack.callback(writer.close)
                log.info("following", label=began.label, next_step=writer.next_step)
            await _follow(store, settings.run, writers, ended)


async def _began(store: ObjectStore, run: str, ended: asyncio.Event) -> RunStarted | None:
    """Wait until the run has begun; returns None if this process is to end before that."""
    while True:
        last_look = ended.is_set()
        try:
            recipe = await read_recipe(store, run)
            if recipe is not None and await read_commit(store, run, 0) is not None:
                return RunStarted(recipe, await stored_digest(store, run, 0))
        except Unavailable as error:
            log.warning("store_unavailable", error=str(error))
        if last_look:
            return None
        await _pause(ended)


async def _follow(
    store: ObjectStore, run: str, writers: Sequence[MetricWriter], ended: asyncio.Event
) -> None:
    announced = AnnouncedEvaluations(store, run, Log.of_evaluations(store, run))
    while True:
        # read before the look, so that all that is committed by then is written
        last_look = ended.is_set()
        try:
            await _write_new(store, run, writers)
            await _show_new(store, announced, writers)
        except Unavailable as error:
            log.warning("store_unavailable", error=str(error))
        if last_look:
            return
        await _pause(ended)


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
    """Writes lines of JSON to stdout, in the form of `/v1/events`; begins with step 1 at each
    start."""

    def __init__(self) -> None:
        self.next_step = 1

    def write(self, record: CommitRecord) -> None:
        typer.echo(json.dumps({"event": "commit", "data": commit_fields(record)}))
        self.next_step = record.policy.version + 1

    def needs(self, finished: FinishedEvaluation) -> bool:
        """Write the figures of an evaluation; pictures are not for lines."""
        fields = evaluation_fields(finished.entry)
        typer.echo(json.dumps({"event": "evaluation", "data": fields}))
        return False

    def show(self, finished: FinishedEvaluation, panel: Panel) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing: each line is written at once."""


def _open(targets: MetricTargets, began: RunStarted) -> list[MetricWriter]:
    writers: list[MetricWriter] = []
    if targets.tensorboard is not None:
        from digenrl.follow.tensorboard import TensorBoard

        writers.append(TensorBoard(targets.tensorboard / began.label))
    if targets.wandb is not None:
        from digenrl.follow.wandb import WeightsAndBiases

        writers.append(WeightsAndBiases(targets.wandb, began.label, began.recipe))
    if targets.lines:
        writers.append(MetricLines())
    return writers


async def _pause(ended: asyncio.Event) -> None:
    try:
        await asyncio.wait_for(ended.wait(), POLL_S)
    except TimeoutError:
        return


@contextmanager
def _told_to_end() -> Iterator[asyncio.Event]:
    event, loop = asyncio.Event(), asyncio.get_running_loop()
    for signum in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(signum, event.set)
    try:
        yield event
    finally:
        for signum in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(signum)
