"""The study from beginning to end: which runs are made, of which model and batches, and what of.

One thread takes 0.2 to 1.2 s to generate or to train a group of the digits' own size, and both
take about as long: where they do not, one of the devices alone decides what a batch takes. Messages
cost little beside that.
"""

import asyncio
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from bench.digits.network import Network
from bench.runner.placement import Placement, this_machine
from bench.runner.rounds import by_turns
from bench.runner.session import Session, open_session
from bench.stored import write_result
from bench.two_devices.compare import PartResult, RunFigures, figures_of, summarise
from bench.two_devices.modes import FAST_ALONE, ONE_STEP, SEQUENTIAL, Mode, Part, modes_of
from bench.two_devices.output import as_plain, draw, show_part
from bench.two_devices.run import measured_run, on
from digenrl.local.checking.inputs import check_inputs
from shared.errors import UserError
from shared.recipe.recipe import Recipe, load_recipe, override

NETWORK = Network(layers=4, heads=4, head_width=32)
STEPS = 16
"""Denoising steps."""
WINDOW = 4
"""Denoising steps that are trained: generating a group takes a third longer than training it."""
GROUPS, QUICK_GROUPS = 10, 6
QUICK_BATCHES = 2
QUICK_MODES: Mapping[Part, tuple[str, ...]] = {
    "equal": (SEQUENTIAL, ONE_STEP),
    "slowed": (FAST_ALONE, ONE_STEP),
}
"""The ends of each ladder."""

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What is asked of `python -m bench two-devices`."""

    recipe: Path
    parts: tuple[Part, ...]
    modes: tuple[str, ...] = ()
    """Names of modes; all if there are none."""
    rounds: int
    batches: int
    """Batches of every run that are measured."""
    slowdown: float
    quick: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Study:
    """One part of what is wanted."""

    part: Part
    recipe: Recipe
    """The given one, with what is the same in all modes set anew."""
    changes: Mapping[str, Any]
    """What was set anew."""
    modes: tuple[Mode, ...]
    rounds: int
    batches: int
    slowdown: float
    """How many times slower the rollout device is."""

    @property
    def samples(self) -> int:
        return self.recipe.batch.groups * self.recipe.batch.group_size

    @property
    def words(self) -> str:
        """What was set anew, for people; folders by their names only."""
        return ", ".join(
            f"{key} = {value.name if isinstance(value, Path) else value}"
            for key, value in self.changes.items()
        )

    def recipe_of(self, mode: Mode, number: int) -> Recipe:
        """Returns the recipe of one run: warm-up, the measured batches, and one that is begun
        beside the last of them."""
        batches = min(self.batches, mode.most_batches or self.batches)
        own = {
            "run.name": f"{self.part}-{mode.slug}-{number}",
            "run.steps": mode.warm_up + batches + 1,
        }
        return override(self.recipe, {**mode.changes, **own})

    async def measure(self, session: Session, placement: Placement, say: Say) -> PartResult:
        async def measured(mode: Mode, number: int) -> RunFigures:
            recipe = self.recipe_of(mode, number)
            record = await measured_run(
                session, placement, recipe, warm_up=mode.warm_up, slowdown=self.slowdown
            )
            found = figures_of(
                record, mode.warm_up, recipe.run.steps - 1, group_size=recipe.batch.group_size
            )
            batches = " ".join(f"{seconds:.2f}" for seconds in found.batches)
            say(
                f"{self.part} {number + 1}/{self.rounds}  {mode.name:<18} "
                f"{found.step:.3f} s per batch ({batches})"
            )
            return found

        measurements = await by_turns(self.modes, self.rounds, measured)
        return summarise(self.part, measurements, samples=self.samples, slowdown=self.slowdown)


def measure(
    wanted: Wanted, folder: Path, console: Console, *, json_file: Path | None, plots: Path | None
) -> None:
    """Raises UserError before anything is started, if something is missing."""
    placement = this_machine()
    model = ensure_model(folder, NETWORK, seed=0)
    studies = [plan_study(wanted, part, model) for part in wanted.parts]
    for study in studies:
        check_inputs(study.recipe)
    results = asyncio.run(_run(studies, folder, placement, console))
    if json_file is not None:
        write_result(json_file, as_plain(results, about(studies, placement)))
    if plots is not None:
        draw(results, plots)


def plan_study(wanted: Wanted, part: Part, model: Path) -> Study:
    """Plans one part with the modes of it that are wanted.

    Raises:
        UserError: if the part has none of them, or the recipe cannot take the changes.
    """
    quick = wanted.quick
    changes = recipe_changes(WINDOW, QUICK_GROUPS if quick else GROUPS, model)
    recipe = override(load_recipe(wanted.recipe), changes)
    known = modes_of(part, window=WINDOW, group_size=recipe.batch.group_size)
    only = wanted.modes or (QUICK_MODES[part] if quick else [mode.name for mode in known])
    modes = tuple(mode for mode in known if mode.name in only)
    if not modes:
        names = ", ".join(mode.name for mode in known)
        raise UserError(f"--mode: part {part} has none of these; known are: {names}")
    return Study(
        part=part,
        recipe=recipe,
        changes=changes,
        modes=modes,
        rounds=1 if quick else wanted.rounds,
        batches=min(wanted.batches, QUICK_BATCHES) if quick else wanted.batches,
        slowdown=wanted.slowdown if part == "slowed" else 1.0,
    )


def recipe_changes(window: int, groups: int, model: Path) -> dict[str, Any]:
    """Returns what is set anew in the given recipe, in every mode."""
    return {
        "model.folder": model,
        "model.height": 8,
        "model.width": 8,
        "sampling.steps": STEPS,
        "sampling.window": window,
        "batch.groups": groups,
        "trainer.threads": 1,
        "trainer.devices": 1,
        "trainer.deterministic": False,
        "rollout.workers": 1,
        "rollout.threads": 1,
        "reward.workers": 1,
        "reward.threads": 1,
    }


def model_folder(folder: Path, network: Network) -> Path:
    width = network.heads * network.head_width
    return folder / f"model-d{width}-l{network.layers}-p{network.patch}"


def ensure_model(folder: Path, network: Network, *, seed: int) -> Path:
    """Returns the folder of an untrained model of this size, made on first use in some seconds."""
    made = model_folder(folder, network)
    if not made.exists():
        from bench.digits.build import build_untrained  # torch

        aside = made.with_name(f"{made.name}.part")
        build_untrained(aside, network, seed=seed)
        aside.rename(made)
    return made


def about(studies: Sequence[Study], placement: Placement) -> dict[str, Any]:
    return {
        "placement": placement.words,
        "changes": {study.part: study.words for study in studies},
        "slowdown": {study.part: study.slowdown for study in studies},
    }


async def _run(
    studies: Sequence[Study], folder: Path, placement: Placement, console: Console
) -> list[PartResult]:
    def say(line: str) -> None:
        console.print(line, highlight=False)

    began, results = time.monotonic(), []
    say(placement.words)
    runs = folder / "runs"
    with tempfile.TemporaryDirectory(dir=folder, prefix="brokers-") as data:
        async with open_session(
            runs, Path(data), place=lambda program: on(program, placement.others)
        ) as session:
            for study in studies:
                say(f"{study.part}: {study.words}")
                results.append(await study.measure(session, placement, say))
    for study, result in zip(studies, results, strict=True):
        show_part(result, console, group_size=study.recipe.batch.group_size)
    say(f"{time.monotonic() - began:.0f} s in all")
    return results
