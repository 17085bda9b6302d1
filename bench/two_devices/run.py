"""One run of the real services, each device's process on its core."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace

from bench.runner.figures import RunRecord
from bench.runner.placement import Placement, pinned
from bench.runner.session import Session
from bench.runner.watch import Watch, service, watching
from bench.two_devices.intervals import intervals_of, jobs_of
from digenrl.local.brokers.embedded import Program
from digenrl.local.processes.ports import free_ports
from shared.recipe.recipe import Recipe

ROLLOUT, TRAINER = "rollout-0", "trainer-0"
DEVICES = (ROLLOUT, TRAINER)
SERVICES = ("scheduler", "reward-0", ROLLOUT, TRAINER)
PATIENCE_S = 240.0
HEAD_START_S = 1.0
"""The trainer starts last: its first version opens the first batch, whoever is there to generate
it. One that it has to generate alone says nothing about the others."""
STOP_S = 1.0
"""A run that has been measured is not drained."""


async def measured_run(
    session: Session, placement: Placement, recipe: Recipe, *, warm_up: int, slowdown: float
) -> RunRecord:
    """Starts the services, waits for every batch of the recipe but its last, and stops them.

    The last one has no next batch beside it, as others have with one-step asynchrony.

    Raises:
        Unavailable: if the batches do not come in time, something failed, or a service died.
    """
    run, last = recipe.run.name, recipe.run.steps - 1
    folder = session.new_folder(run)
    (folder / "recipe.json").write_text(recipe.model_dump_json(indent=1))
    async with watching(
        session, run, folder / "logs", [f"dg.{run}.>"], patience_s=PATIENCE_S, stop_s=STOP_S
    ) as watch:
        await _start(watch, placement, recipe, str(folder / "recipe.json"), slowdown)
        begin, end = await watch.follow(warm_up, last, lambda _: None, streams=False)
        usage = await watch.usage(last)
    return RunRecord(
        commits=watch.commits,
        begin=begin,
        end=end,
        usage=usage,
        intervals=intervals_of(jobs_of(watch.heard)),
    )


async def _start(
    watch: Watch, placement: Placement, recipe: Recipe, path: str, slowdown: float
) -> None:
    cores = {ROLLOUT: (placement.rollout,), TRAINER: (placement.trainer,)}
    for name in SERVICES:
        if name == TRAINER:
            await asyncio.sleep(HEAD_START_S)
        if name != ROLLOUT or recipe.rollout.workers:
            kind = name.partition("-")[0]
            run = ["--recipe", path] if kind == "scheduler" else ["--run", watch.run]
            worker = [] if kind == "scheduler" else ["--worker", name]
            module = ["digenrl", "serve", kind]
            if name == ROLLOUT and slowdown > 1:
                module = ["bench.slowed", str(slowdown)]
            port = ["--port", str(free_ports(1)[0])]
            program = service(name, [*module, *run, *worker, *port])
            cpus = cores.get(name, placement.others)
            await watch.services.start(on(program, cpus), wait=False)


def on(program: Program, cpus: Sequence[int]) -> Program:
    """Returns the program, started on these cores."""
    return replace(program, argv=pinned(program.argv, cpus))
