"""`python -m bench shared-noise`: what shared noise saves, beside what the planner forecasts of it.

The costs of a call and of a row, in generation and in training, are measured on groups whose
samples have noise of their own: whole groups, and pairs of samples. The planner's formulas then say
what a group of shared noise takes to generate and to train, and the same rollout and trainer are
timed at it, by turns with the others.
"""

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from statistics import median

import torch
from rich.console import Console
from rich.table import Table

from bench.loop import WARM_UP, Ours
from services.scheduler.costs.counted import DEVICE, counted_profile
from services.scheduler.costs.profile import Profile
from services.scheduler.costs.recipes import batch_shape
from services.scheduler.costs.seconds import fragment_seconds, gradient_seconds
from shared.diffusion.policy import load_policy
from shared.learning.prompts import read_prompts
from shared.recipe.recipe import Recipe, override


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Milliseconds per sample of one part of the work: medians of the rounds."""

    apart: float
    shared: float
    forecast: float

    @property
    def deviation(self) -> float:
        """The measured share that is left, over the forecast one, less 1."""
        return self.shared / self.forecast - 1


def show(found: dict[str, Part]) -> None:
    table = Table("ms per sample", "noise apart", "shared", "forecast", "left", "off the forecast")
    for name, part in found.items():
        figures = (f"{each:.2f}" for each in asdict(part).values())
        left = f"{part.shared / part.apart:.3f}"
        table.add_row(name, *figures, left, f"{part.deviation:+.1%}")
    Console().print(table)


def compare(recipe: Recipe, rounds: int, groups: int) -> dict[str, Part]:
    """Time so many groups per round with shared noise and without.

    Returns:
        the parts `rollout` and `trainer`.
    """
    torch.set_num_threads(recipe.trainer.threads)
    shared = override(recipe, {"sampling.shared_noise": True})
    apart = override(recipe, {"sampling.shared_noise": False})
    pair = override(
        apart,
        {"batch.group_size": 2, "schedule.fragment_size": "auto", "trainer.micro_batch": "auto"},
    )
    prompt = read_prompts(recipe.data.prompts)[0].text
    loaded = load_policy(recipe, {"transformer", "text", "decoder"})
    ours = {name: Ours(each, loaded, prompt) for name, each in
            {"shared": shared, "apart": apart, "pair": pair}.items()}  # fmt: skip
    for each in ours.values():
        for group in range(WARM_UP):
            each.train(each.generate(group))
    data = {name: each.generate(0) for name, each in ours.items()}
    found: dict[tuple[str, str], list[float]] = {}
    for _ in range(rounds):
        for name, each in ours.items():
            for part, work in (
                ("rollout", each.generate),
                ("trainer", lambda _, name=name, each=each: each.train(data[name])),
            ):
                found.setdefault((part, name), []).append(_seconds(work, groups))
    seconds = {key: median(each) for key, each in found.items()}
    size = recipe.batch.group_size
    profile = _calibrated(apart, seconds)
    of_shared = profile.model_copy(update={"shape": batch_shape(shared)})
    forecast = {
        "rollout": fragment_seconds(of_shared, DEVICE, size),
        "trainer": gradient_seconds(of_shared, DEVICE, size),
    }
    return {
        part: Part(
            apart=1e3 * seconds[part, "apart"] / size,
            shared=1e3 * seconds[part, "shared"] / size,
            forecast=1e3 * forecast[part] / size,
        )
        for part in ("rollout", "trainer")
    }


def _seconds(work: Callable[[int], object], groups: int) -> float:
    began = time.perf_counter()
    for group in range(groups):
        work(group)
    return (time.perf_counter() - began) / groups


def _calibrated(recipe: Recipe, seconds: dict[tuple[str, str], float]) -> Profile:
    """Return costs with which the planner's formulas give the seconds measured of a whole group and
    of a pair of samples, generated and trained."""
    shape, size = batch_shape(recipe), recipe.batch.group_size
    group, pair = seconds["rollout", "apart"], seconds["rollout", "pair"]
    row = (group - pair) / (size - 2) / shape.steps
    call = max(0.0, pair / shape.steps - 2 * row)
    profile = counted_profile(shape, forward_only_passes=0.0)
    costs = {"call_seconds": call, "sample_seconds": row}
    rollout = profile.rollout.model_copy(update=costs)
    profile = profile.model_copy(update={"rollout": rollout})
    group, pair = (seconds["trainer", name] / shape.trained_steps for name in ("apart", "pair"))
    rho = group / (size * profile.forward_seconds)
    of_pass = max(0.0, pair - 2 * (group - pair) / (size - 2))
    trained = {"rho": rho, "call_factor": of_pass / (rho * call) if call else 1.0}
    return profile.model_copy(update={"variant": profile.variant.model_copy(update=trained)})
