"""States in a sentence what a run does, what limits it, and what may help."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from digenrl.reading.schedule import ScheduleSummary
from digenrl.reading.wording import figure
from services.scheduler.shell.api_load import LoadView
from services.scheduler.shell.api_models import RunView, WorkerView
from shared.messages.contracts import TagMode
from shared.recipe.recipe import Recipe

GOOD_SHARE = 0.9
"""Share of their time that devices work from which no setting is worth a try."""

GOOD_PACE = 2 / 3
"""Part of its forecast from which a run is as fast as its schedule explains: that knows no costs
between groups, and is learned from times that are not disturbed."""
GOOD_BOUND_SHARE = 0.8
"""Share of the bound from which a schedule leaves little to gain."""
SLOWER_THAN_FORECAST = (
    "It is slower than its schedule explains. First see to alarms of what is late or fails, then "
    "to the slowest worker (`digenrl workers {run}`), then to restarts (`digenrl logs {run}`)."
)
FORECAST_BELOW_BOUND = (
    "The schedule leaves devices idle: in another run, another split of the devices may help."
)
UNSCORED = (
    "Rewards are what to see to: what the devices could do, by the schedule's forecast and the "
    "bound, does not count how fast samples are scored."
)
NO_SCHEDULE: Mapping[str, str] = {
    "waiting_for_conditions": (
        "Neither counts the encoding of prompts: the encoder is what to see to."
    ),
    "waiting_for_weights": (
        "The bound does not count how long new weights take to the devices: these are what to see "
        "to."
    ),
    "paused": "Neither counts the time for which the run was paused.",
}
"""Delays outside of the schedule, and what forecast and bound include of them."""


RESUMED = "(stop the run, and repeat its command with `"
REMEDIES: Mapping[str, tuple[str, Sequence[str]]] = {
    "waiting_for_rollout": (
        "for generation",
        (
            "more rollout devices",
            "schedule.tag = auto (`digenrl tag {run} auto`), so that members help",
        ),
    ),
    "waiting_for_trainer": (
        "for training",
        (
            "more devices that train",
            "in another run schedule.mode = fluid",
            "in another run schedule.max_staleness = 1",
        ),
    ),
    "waiting_for_reward": (
        "for rewards",
        ("a faster scorer", f"more reward.workers {RESUMED}--reward.workers N`)"),
    ),
    "tail": (
        "at the end of a batch for the slowest device",
        ("in another run schedule.fragment_size = auto", "in another run more batch.groups"),
    ),
    "waiting_for_weights": ("for new weights", ("a faster network", "a shared host cache")),
    "waiting_for_conditions": (
        "for encoded prompts",
        (f"more encoder.workers {RESUMED}--encoder.workers N`)",),
    ),
    "paused": ("because the run is paused", ("`digenrl resume {run}`",)),
}


def active_settings(run: RunView, recipe: Recipe | None, tag: TagMode | None) -> set[str] | None:
    """Return the settings of a run, as remedies write them; None if it has ended.

    Args:
        tag: mode in force of trainer-assisted generation; None: not known.
    """
    if run.phase not in ("running", "waiting", "paused"):
        return None
    tables: dict[str, Any] = {"schedule": {"mode": "disaggregated"}}
    tables |= {} if recipe is None else recipe.model_dump(mode="json")
    tables["schedule"]["max_staleness"] = run.max_staleness  # what was decided for "auto"
    if tables["schedule"]["mode"] == "disaggregated":  # other modes have no TAG
        tables["schedule"]["tag"] = tag
    return {
        f"{table}.{key} = {tables[table][key]}".lower() for table in tables for key in tables[table]
    }


def bottleneck(
    schedule: ScheduleSummary,
    run: str = "RUN",
    settings: Collection[str] | None = None,
    *,
    fails: bool = False,
) -> str:
    """Return one sentence: for what devices wait most, and what may change that.

    Args:
        settings: settings of a run in progress, for which remedies are advised; None: it is
            over, so that nothing can be changed.
        fails: whether work fails and is repeated, as `alarms.is_failing` reports it.
    """  # fmt: skip
    if schedule.utilisation is None:
        return "What devices wait for is known after a batch that was measured from start to end."
    share, use = schedule.utilisation, main_wait(schedule)
    if not use:
        return f"Rollout and trainer devices are at work {share:.0%} of their time."
    what, remedies = REMEDIES[use]
    text = (
        f"Rollout and trainer devices are at work {share:.0%} of their time; most of the rest, "
        f"{schedule.bubbles[use]:.0%}, they wait {what}."
    )
    if settings is None:
        return text
    useful = ", or ".join(
        each.format(run=run) for each in remedies if not any(has in each for has in settings)
    )
    first = "first a mend of what fails, since each attempt takes its time again; then "
    return f"{text} What may help: {first if fails else ''}{useful}."


def main_wait(schedule: ScheduleSummary) -> str:
    """Return for what devices wait most; empty if that is not known, or not worth a word."""
    share, bubbles = schedule.utilisation, schedule.bubbles
    if share is None or share >= GOOD_SHARE or not bubbles:
        return ""
    others = {use: part for use, part in bubbles.items() if use != "paused" and part > 0}
    return max(others or bubbles, key=lambda each: bubbles[each])


def throughput(
    load: LoadView | None, waits: str = "", run: str = "RUN", *, advises: bool = True
) -> str:
    """Return one sentence: samples per second against what is possible, and where to look if they
    are few; empty before the second step.

    Args:
        waits: for what devices wait most, as `main_wait` returns it.
        run: name of the run, for commands.
        advises: whether advice is useful: the run is in progress, and its first steps, in which
            devices warm up, are not all that is measured.
    """
    if load is None or load.samples_per_second is None:
        return ""
    now, forecast, bound = (
        load.samples_per_second, load.forecast_samples_per_second, load.bound_samples_per_second
    )  # fmt: skip
    are = "are" if load.queues else "were"  # a run that is over has none
    pace = f"{figure(now)} samples {are} trained per second"
    if waits == "waiting_for_reward":
        return f"{pace}. {UNSCORED}"
    if forecast is None or bound is None:
        return f"{pace}; what is possible is not learned yet."
    advice = _advice(now, forecast, bound, waits).format(run=run) if advises else ""
    limit = f", and no schedule gets beyond about {figure(bound)} on these devices"
    limit = limit if now <= bound else ""  # a bound of learned times may be too low
    return f"{pace}; the schedule's forecast is {figure(forecast)}{limit}.{advice and ' '}{advice}"


def _advice(now: float, forecast: float, bound: float, waits: str) -> str:
    """Return where to look if throughput is far below its bound, else empty: schedule and workers
    do not cause delays of other services."""
    is_slow = now < GOOD_PACE * forecast
    if not is_slow and forecast >= GOOD_BOUND_SHARE * bound:
        return ""
    return NO_SCHEDULE.get(waits) or (SLOWER_THAN_FORECAST if is_slow else FORECAST_BELOW_BOUND)


def status(run: RunView, *, is_live: bool) -> str:
    """Return what the run does now, or how it has ended."""
    if not is_live:
        if run.phase in ("finished", "failed"):
            return run.phase
        return (
            "not begun"
            if run.policy_version is None
            else (f"not running; stopped after step {run.step}")
        )
    at_failure = "; pauses at the next failure" if run.pause_at_failure else ""
    if run.phase == "running" and run.waiting_for != "nothing":
        return f"running, waits for {awaited(run)}{at_failure}"
    if run.phase == "waiting" and run.missing_workers:
        return f"waiting for a worker of: {', '.join(run.missing_workers)}"
    return f"{run.phase}{at_failure}"


def awaited(run: RunView) -> str:
    """Return what a run waits for: in fluid mode, no worker of rollout may exist."""
    work = {"rollout": "generation", "reward": "scores", "trainer": "training"}
    return work.get(run.waiting_for, run.waiting_for)


def slow_scorer(waits: str, workers: Sequence[WorkerView]) -> str:
    """Return what reward workers report of their scorers, if devices wait most for rewards; empty
    if they have one scorer only.

    Args:
        waits: for what devices wait most.
    """
    notes = [each.note for each in workers if each.service == "reward" and each.note]
    return f"Scoring: {notes[0]}." if notes and waits == "waiting_for_reward" else ""
