"""Computes for an ended run the same reports as its scheduler's.

The types are the scheduler's; no worker is there, and nothing waits.
"""

from collections.abc import Iterable, Sequence
from statistics import median

from digenrl.reading.facts import StepFacts
from digenrl.reading.schedule import summarise_schedule
from services.scheduler.core.state import Phase
from services.scheduler.shell.api_load import LoadView
from services.scheduler.shell.api_models import RunView, TagDecisionView, TagView
from shared.learning.metrics import nothing_trained
from shared.recipe.recipe import Recipe
from shared.release import RELEASE
from shared.run.usage import BatchUsage, per_second


def run_at_end(
    run: str, recipe: Recipe | None, steps: Sequence[StepFacts], usage: Sequence[BatchUsage], *,
    phase: Phase, failure: str | None, staleness: tuple[int, str] | None, num_open_letters: int,
) -> RunView:  # fmt: skip
    """Return where a run has ended. ``recipe`` is None if the run has not begun; ``staleness`` is
    the decision for `schedule.max_staleness` "auto", with its reason."""
    metrics = steps[-1].metrics if steps else {}
    limit = 0 if recipe is None else recipe.schedule.staleness_limit
    stale, reason = (limit, None) if staleness is None else staleness
    step = steps[-1].version if steps else 0
    return RunView(
        run=run, release=RELEASE, phase=phase, step=step, policy_version=step if steps else None,
        steps=0 if recipe is None else recipe.run.steps, reward_mean=metrics.get("reward_mean"),
        effective_sample_share=metrics.get("effective_sample_share"),
        seconds_per_step=summarise_schedule([], usage).seconds_per_step, eta_seconds=None,
        waiting_for="nothing" if phase == "finished" else "operator", num_workers={},
        missing_workers=[], num_quarantined=0, num_dead_letters=num_open_letters,
        pause_at_failure=False, failure=failure,
        alarms=nothing_trained([(each.version, each.metrics) for each in steps]),
        max_staleness=stale, max_staleness_reason=reason,
    )  # fmt: skip


def load_at_end(recipe: Recipe | None, usage: Sequence[BatchUsage]) -> LoadView:
    """Return what the newest batches took, and what the schedule and the devices allowed."""
    samples = 0 if recipe is None else recipe.batch.groups * recipe.batch.group_size
    forecast = _median(each.forecast_seconds for each in usage)
    return LoadView(
        samples_per_second=per_second(samples, summarise_schedule([], usage).seconds_per_step),
        forecast_samples_per_second=per_second(samples, forecast), queues=[], slowest=None,
        bound_samples_per_second=per_second(samples, _median(each.bound_seconds for each in usage)),
    )  # fmt: skip


def _median(seconds: Iterable[float | None]) -> float | None:
    numbers = [each for each in seconds if each is not None]
    return median(numbers) if numbers else None


def tag_at_end(recipe: Recipe | None, usage: Sequence[BatchUsage]) -> TagView:
    """Return what the recipe asked for, and what was decided in the newest batches."""
    fixed = None if recipe is None else recipe.schedule.fixed_tag
    return TagView(
        mode="auto" if fixed is None else "fixed" if fixed else "off",
        groups=fixed or 0, lent=0, members=0, samples_left=0, costs={},
        decisions=[
            TagDecisionView(
                batch=each.batch, groups=each.tag.groups, reason=each.tag.reason,
                predicted_seconds=None, predicted_gain=each.tag.predicted_gain,
                measured_seconds=each.seconds, measured_gain=each.tag.measured_gain,
            )
            for each in reversed(usage) if each.tag is not None
        ],
    )  # fmt: skip
