"""Two recipes by turns through the real services: how much device time each needs to learn.

Every run is `digenrl up`, as a user types it, of a recipe that keeps every second version. Device
time is what the devices themselves report: the seconds of each fragment, from its first denoising
step to its decoded images (`FragmentGenerated`), of each piece that is trained (`PieceTrained`),
and of each optimizer step until its version is published (`PolicyPublished`). They are heard on the
run's bus while it goes on. The versions are judged when the run is over, at fixed noise, so that
this takes nothing from it.
"""

import asyncio
import contextlib
import json
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import nats
from nats.aio.msg import Msg
from nats.errors import Error as NatsError

from bench.learning import figures
from bench.learning.case import EVERY, figures_of, judge
from bench.learning.task import DIGITS
from digenrl.evaluation.run import weights_to_use
from digenrl.local.runs import find_run
from digenrl.local.secrets.tokens import KEYS
from digenrl.local.store import run_store
from shared.diffusion.sampling.tensors import pack
from shared.errors import ContractError, DigenRLError
from shared.messages.codec import decode
from shared.messages.contracts import FragmentGenerated, PolicyPublished
from shared.messages.fluid import PieceTrained
from shared.messages.rights import inbox_subject
from shared.process.settings import ServiceSettings
from shared.recipe.recipe import Recipe, load_recipe
from shared.run.commits import commit_chain
from shared.store import open_store

GOAL = 0.95
LISTEN_S = 0.1


def measure(recipes: Mapping[str, Path], seeds: Sequence[int], out: Path, folder: Path) -> None:
    """Runs each recipe with each seed, by turns, and writes a result per run into ``out``; what has
    its result is not run again."""
    for number, seed in enumerate(seeds):
        names = list(recipes)
        for name in names if number % 2 == 0 else reversed(names):
            path = out / f"{name}.{seed}.json"
            if not path.is_file():
                result = run_once(recipes[name], f"{name}-{seed}", seed, folder)
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(json.dumps({"recipe": name, **result}, indent=1) + "\n")
            _say(json.dumps(of_run(json.loads(path.read_text()))))


def run_once(recipe: Path, name: str, seed: int, folder: Path) -> dict[str, Any]:
    """Runs a recipe through the services, and judges its versions.

    Raises:
        DigenRLError: if the command fails.
    """
    path = folder / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"base": str(recipe.resolve()), "run": {"keep_every": EVERY}}))
    of = ("--runs", str(folder))
    began = time.monotonic()
    heard = asyncio.run(_up(path, seed, folder / name, of))
    seconds = time.monotonic() - began
    with run_store(find_run(str(folder / name), folder)):
        evaluations = asyncio.run(_evaluations(load_recipe(path), name, heard))
    summary = json.loads((folder / name / "summary.json").read_text())
    return {
        "seed": seed,
        "command_seconds": round(seconds, 1),
        "run_seconds": summary["wall_s"],
        "report_seconds": summary["report_s"],
        "seconds_per_step": summary["schedule"]["seconds_per_step"],
        "evaluations": evaluations,
    }


@dataclass(slots=True)
class Heard:
    """Adds up what devices report of a run."""

    seconds: dict[int, dict[str, float]] = field(default_factory=dict)
    """Batch -> what was done -> device seconds."""

    async def receive(self, raw: Msg) -> None:
        try:
            message = decode(raw.data)
        except ContractError:
            return  # the broker's own
        match message:
            case FragmentGenerated(fragment=fragment, seconds=seconds):
                self._add(fragment.batch, "generating", seconds)
            case PieceTrained(batch=batch, seconds=seconds):
                self._add(batch, "training", seconds)
            case PolicyPublished(policy=policy, seconds=seconds):
                self._add(policy.version - 1, "committing", seconds)

    def _add(self, batch: int, what: str, seconds: float) -> None:
        of_batch = self.seconds.setdefault(batch, {})
        of_batch[what] = of_batch.get(what, 0.0) + seconds

    def until(self, version: int) -> dict[str, float]:
        """Returns device seconds of all batches before a version, by what was done."""
        done = [each for batch, each in self.seconds.items() if batch < version]
        names = sorted({what for each in done for what in each})
        return {what: round(sum(each.get(what, 0.0) for each in done), 3) for what in names}


async def _up(recipe: Path, seed: int, folder: Path, runs: Sequence[str]) -> Heard:
    """Runs a recipe to its end and listens meanwhile."""
    argv = ["up", str(recipe), "--fresh", "--seed", str(seed), "--run", folder.name, *runs]
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "digenrl", *argv,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
    )  # fmt: skip
    heard = Heard()
    listening = asyncio.create_task(_listen(folder, heard))
    output, _ = await process.communicate()
    listening.cancel()
    await asyncio.gather(listening, return_exceptions=True)
    if process.returncode:
        raise DigenRLError(f"digenrl up: {output.decode(errors='replace')[-2000:]}")
    return heard


async def _listen(folder: Path, heard: Heard) -> None:
    """Subscribes as soon as the run's broker is there."""
    while True:
        with contextlib.suppress(OSError, NatsError, AttributeError):
            url = (folder / KEYS / "client" / "digenrl_nats_url").read_text()
            client = await nats.connect(
                url, error_cb=_ignored, inbox_prefix=inbox_subject("client")
            )
            break
        await asyncio.sleep(LISTEN_S)
    try:
        for kind in ("traj", "evt"):
            await client.subscribe(f"dg.{folder.name}.{kind}.>", cb=heard.receive)
        await asyncio.Event().wait()
    finally:
        await client.close()


async def _ignored(error: Exception) -> None:
    """The broker goes when the run is over."""


async def _evaluations(recipe: Recipe, name: str, heard: Heard) -> list[dict[str, Any]]:
    """Judges every second version and the last, as the bench judges its own: records of 400 samples
    each would fill the store for nothing."""
    store, judged = open_store(ServiceSettings(run=name).store), judge(DIGITS)
    size = recipe.batch.groups * recipe.batch.group_size
    found = []
    for commit in await commit_chain(store, name):
        version = commit.policy.version
        if version % EVERY == 0 or version == recipe.run.steps:
            quality = judged(pack(await weights_to_use(store, recipe, commit)))
            found.append({
                "version": version,
                "samples": version * size,
                "seconds": heard.until(version),
                **figures_of(DIGITS, quality),
            })  # fmt: skip
    return found


def of_run(result: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the figures of one run."""
    kept = figures.guards(result)
    return {
        "recipe": result["recipe"],
        "seed": result["seed"],
        "device_seconds": figures.cost_of(result, GOAL, figures.seconds),
        "steps": figures.cost_of(result, GOAL, figures.steps),
        "base_nn": kept.base_nn,
        "largest_nn": kept.largest_nn,
        "smallest_div": kept.smallest_div,
        "worst_at_end": kept.worst_at_end,
        "gold": figures.at_end([result], "gold")[0],
        "svm": figures.at_end([result], "svm")[0],
        "command_seconds": result["command_seconds"],
    }


def compared(out: Path, old: str, new: str) -> dict[str, Any]:
    """Returns the medians of both recipes, and the ratio of their device seconds."""
    found = {name: list(_read(out, name)) for name in (old, new)}
    middles = {
        name: figures.middle(figures.costs(results, GOAL, figures.seconds))
        for name, results in found.items()
    }
    before, after = middles[old], middles[new]
    return {
        "device_seconds": middles,
        "ratio": None if before is None or after is None else after / before,
        "command_seconds": {
            name: median(each["command_seconds"] for each in results)
            for name, results in found.items()
        },
        "guards_hold": {
            name: all(figures.guards(each).hold() for each in results)
            for name, results in found.items()
        },
    }


def _read(out: Path, name: str) -> Iterator[dict[str, Any]]:
    for path in sorted(out.glob(f"{name}.*.json")):
        yield json.loads(path.read_text())


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()
