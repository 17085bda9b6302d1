"""Checks whether a recipe can run, and forecasts its time and memory on given devices."""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from digenrl.hub.dataset import make_own_prompts
from digenrl.local.checking.inputs import check_except_model, check_inputs, skipped_rows
from digenrl.local.checking.preflight import disk_bytes, ignore, versions_bytes
from digenrl.local.checking.verdict import Verdict, gpu_kinds, verdict_here, verdict_on
from digenrl.local.processes.gpus import visible_cards
from digenrl.local.runs import runs_folder
from digenrl.planning.forecast import Forecast, as_dict, forecast, has_profile, lines
from digenrl.planning.plan import given_pool
from digenrl.planning.runnable import HOST_GPUS
from digenrl.trace.output import lines as trace_lines
from digenrl.trace.record import Trace
from services.scheduler.costs.profile import load_profile
from services.scheduler.costs.recipes import profile_for
from services.scheduler.sim.staleness import decide_at_start
from services.scheduler.sim.staleness import line as staleness_line
from services.scheduler.sim.steady import steady_fragment_size
from shared.errors import UserError
from shared.models.published import find_configuration
from shared.recipe.recipe import NO_OPTIONS, Recipe, implied_values, load_recipe, with_folder
from shared.run.run_recipe import evaluated_on, held_out_rows

ShowLine = Callable[[str], None]
COMPLETE_RECIPE = Verdict(
    True, "the recipe is complete; --devices h100=8 judges devices of other hosts"
)


@dataclass(frozen=True)
class CheckedRun:
    """Result of the check of a recipe."""

    path: Path
    recipe: Recipe
    elsewhere: bool
    """Whether the check skipped model and rewards, because they are on other hosts."""
    forecast: Forecast | None
    """Forecast for the given devices, or for the GPUs of this machine; None without devices."""
    verdict: Verdict
    trace: Trace | None = None
    """Result of a trace, if one was requested."""

    @cached_property
    def lines(self) -> list[str]:
        """Text of the result, line by line."""
        return list(self._lines())

    def _lines(self) -> Iterator[str]:
        recipe, batch = self.recipe, self.recipe.batch
        yield (
            f"{self.path}: {recipe.run.steps} steps of {batch.groups} groups x {batch.group_size} "
            f"samples in fragments of {recipe.schedule.fragment_size}"
        )
        if not self.elsewhere and self.trace is None:
            size, what = _size(versions_bytes(recipe)), "weights, checkpoints and trajectories"
            yield f"the object store holds up to {size} of {what} at a time"
            disk = _size(disk_bytes(recipe))
            yield f"the store of `digenrl up` needs up to {disk} of disk space for these"
        if self.elsewhere:
            yield "the model and the rewards were not checked: they are on other hosts"
        yield from self._derived_values()
        if self.trace is not None:
            yield from trace_lines(self.trace, recipe)
        if self.forecast is not None:
            yield from lines(self.forecast)
        yield from (each.line for each in implied_values(recipe))

    def _derived_values(self) -> Iterator[str]:
        """Report values that do not follow from the recipe alone, such as the value of "auto"."""
        recipe = self.recipe
        yield from skipped_rows(recipe)
        if recipe.evaluation.prompts is None:
            yield f"evaluations measure {evaluated_on(len(held_out_rows(recipe)))}"
        decay = recipe.trainer.decay_steps
        if decay is not None and recipe.run.steps > decay:
            yield (
                f"trainer.decay_steps: the learning rate is 0 after {decay} of {recipe.run.steps} "
                "steps, and the later steps do not learn; raise it with run.steps"
            )
        if recipe.schedule.max_staleness == "auto" and self.forecast is None:
            yield staleness_line(decide_at_start(recipe))

    @property
    def as_json(self) -> str:
        return json.dumps({
            "recipe": str(self.path),
            "ok": self.verdict.can_run,
            "verdict": self.verdict.sentence,
            "said": self.lines,
            "implied": [
                {"key": each.key, "implied": each.implied, "value": each.value}
                for each in implied_values(self.recipe)
            ],
            "forecast": None if self.forecast is None else as_dict(self.forecast),
            "trace": None if self.trace is None else self.trace.model_dump(mode="json"),
        }, indent=2)  # fmt: skip


def check(
    path: Path,
    devices: str | None = None,
    profile: str | None = None,
    *,
    options: Mapping[str, Any] = NO_OPTIONS,
    hosts: str | None = None,
    host_memory: str | None = None,
    host_gpus: int = HOST_GPUS,
    streamed: str | None = None,
    elsewhere: bool = False,
    timing: bool = True,
    traced: bool = False,
    for_profile: bool = False,
    launch_us: str | None = None,
    say: ShowLine = ignore,
) -> CheckedRun:
    """Check all requirements of a run's start, with the options of `digenrl check`.

    Raises UserError with a line for each problem. ``timing``: forecast the step time as well as the
    memory; ``for_profile``: also trace the inputs of a cost profile."""
    recipe = load_recipe(path, options)
    if not elsewhere and make_own_prompts(recipe, say):
        recipe = load_recipe(path, options)
    has_costs = profile is not None or has_profile(recipe)
    recipe, elsewhere, model_trace = _check_files(
        recipe, elsewhere, for_profile or not has_costs if traced else None, say
    )
    forecast_on = partial(
        forecast, recipe, profile=profile, host_gpus=host_gpus, streamed=streamed,
        host_memory=host_memory, timing=timing, trace=model_trace, launch_us=launch_us,
    )  # fmt: skip
    try:
        pool = given_pool(devices, hosts)
        expected, verdict = _decide(recipe, pool, elsewhere, profile, forecast_on)
    except UserError:
        for line in trace_lines(model_trace, recipe) if model_trace else ():
            say(line)  # the trace took a minute or two, and explains the error
        raise
    return CheckedRun(path, recipe, elsewhere, expected, verdict, model_trace)


def _check_files(
    recipe: Recipe, elsewhere: bool, for_profile: bool | None, say: ShowLine
) -> tuple[Recipe, bool, Trace | None]:
    """Check the files of a recipe, or trace its model; ``for_profile`` is None without a trace."""
    if for_profile is not None:
        return trace_model(recipe, elsewhere, for_profile, say)
    if elsewhere and not (recipe.model.folder / "model_index.json").is_file():
        check_except_model(recipe, elsewhere=True)
    else:
        check_inputs(recipe, weights=not elsewhere, elsewhere=elsewhere)
    return recipe, elsewhere, None


def _decide(
    recipe: Recipe, pool: tuple[str, str] | None, elsewhere: bool, profile: str | None,
    forecast_on: Callable[..., Forecast],
) -> tuple[Forecast | None, Verdict]:  # fmt: skip
    if pool is not None:
        expected = forecast_on(pool[1], option=pool[0])
        return expected, verdict_on(pool[1], expected)
    if elsewhere:
        return None, COMPLETE_RECIPE
    return _decide_here(recipe, profile, forecast_on)


def _decide_here(
    recipe: Recipe, profile: str | None, forecast_on: Callable[[str], Forecast]
) -> tuple[Forecast | None, Verdict]:
    """Returns the verdict for this machine, and the forecast for its GPUs if a cost profile covers
    them."""
    cards = () if recipe.model.device == "cpu" else visible_cards()
    known_cards, expected = [card for card in cards if card.kind], None
    if known_cards and (profile is not None or has_profile(recipe)):
        costs = load_profile(profile or profile_for(recipe))
        kinds = gpu_kinds(known_cards, costs)
        try:
            expected = None if kinds is None else forecast_on(kinds)
        except UserError as error:
            return None, Verdict(False, f"this cannot run here: {error}")
    return expected, verdict_here(recipe, runs_folder(), expected)


def trace_model(
    recipe: Recipe, elsewhere: bool, for_profile: bool, say: ShowLine
) -> tuple[Recipe, bool, Trace]:
    """Returns the recipe with the traced configuration, whether model and rewards are assumed to be
    on other hosts, and the trace."""
    configuration = find_configuration(recipe.model.folder, recipe.model.name)
    elsewhere = elsewhere or configuration.is_published
    if configuration.is_published:
        say(
            f"{recipe.model.folder} does not exist: tracing the published configuration of "
            f"{configuration.folder.name}"
        )
    recipe = with_folder(recipe, configuration.folder)
    check_inputs(recipe, weights=False, elsewhere=elsewhere)
    from digenrl.trace.runs import trace, trace_setting  # torch

    setting = trace_setting(recipe, steady_fragment_size(recipe))
    model_trace = trace(recipe, setting, is_published=configuration.is_published, say=say)
    if for_profile and recipe.model.trained == "lora":
        from digenrl.trace.work import count_work

        say("tracing the network for several sizes of samples")
        model_trace = model_trace.model_copy(update={"counted": count_work(recipe, setting)})
    return recipe, elsewhere, model_trace


def _size(size: int) -> str:
    mib = size / (1 << 20)
    return f"{mib / 1024:.1f} GiB" if mib >= 1024 else f"{mib:.1f} MiB"
