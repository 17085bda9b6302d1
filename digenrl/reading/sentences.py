"""Says in a sentence what a run does, what holds it up, and what would help."""

import time
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from digenrl.reading.schedule import ScheduleSummary
from digenrl.reading.wording import QUEUES, cause, clock, figure
from shared.learning.metrics import nothing_trained, ratios_off
from shared.recipe.recipe import Recipe
from shared.run.chain import CommitSummary

RECENT_S = 120.0
"""Seconds for which a dead letter is news: afterwards only lists have it."""
MOST_LETTERS = 200
"""Newest dead letters that are looked at."""
QUIET_S = 20.0
QUIET_STEPS = 1.5
"""Seconds, and steps, without another one after which what failed seems to be mended."""
WATCHED_STEPS = 20
"""So many of the newest steps are looked at for ones that were not taken."""
STILL_STEPS = 4
"""So many steps in a row may leave the weights as they were before somebody should look."""
GOOD_SHARE = 0.9
"""Share of their time that devices work from which no setting is worth a try."""

GOOD_PACE = 2 / 3
"""Part of its forecast from which a run is as fast as its schedule explains: that knows no costs
between groups, and is learned from times that are not disturbed."""
GOOD_FORECAST = 0.8
"""Part of the bound from which a schedule leaves little to be had."""
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
"""What holds up a run and is no part of its schedule, and what forecast and bound know of it."""


RESUMED = "(`digenrl up RECIPE --run {run} --resume"
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
        ("a faster scorer", f"more reward.workers {RESUMED} --reward.workers N`)"),
    ),
    "tail": (
        "at the end of a batch for the slowest device",
        ("in another run schedule.fragment_size = auto", "in another run more batch.groups"),
    ),
    "waiting_for_weights": ("for new weights", ("a faster network", "a shared host cache")),
    "waiting_for_conditions": (
        "for encoded prompts",
        (f"more encoder.workers {RESUMED} --encoder.workers N`)",),
    ),
    "paused": ("because the run is paused", ("`digenrl resume {run}`",)),
}


def settings_of(
    run: Mapping[str, Any] | None, recipe: Recipe | None, tag: str | None
) -> set[str] | None:
    """Return what a run has set, as remedies write it; None if it is over.

    Args:
        run: the scheduler's answer about the run.
        tag: mode in force of trainer-assisted generation; None: not known.
    """
    if run is None or run["phase"] not in ("running", "waiting", "paused"):
        return None
    tables: dict[str, Any] = {"schedule": {"mode": "disaggregated"}}
    tables |= {} if recipe is None else recipe.model_dump(mode="json")
    tables["schedule"]["max_staleness"] = run.get("max_staleness")  # of "auto", what was decided
    if tables["schedule"]["mode"] == "disaggregated":  # others have none
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
        settings: those of a run in progress, of which none is advised; None: it is over, so that
            nothing can be changed.
        fails: whether work fails, and is done again therefore, as `is_failing` says it.
    """  # fmt: skip
    if schedule.utilisation is None or not schedule.bubbles:
        return "What devices wait for is known after the second batch."
    share, use = schedule.utilisation, main_wait(schedule)
    if not use:
        return f"Rollout and trainer devices are at work {share:.0%} of their time."
    what, remedies = REMEDIES[use]
    said = (
        f"Rollout and trainer devices are at work {share:.0%} of their time; most of the rest, "
        f"{schedule.bubbles[use]:.0%}, they wait {what}."
    )
    if settings is None:
        return said
    useful = ", or ".join(
        each.format(run=run) for each in remedies if not any(has in each for has in settings)
    )
    first = "first a mend of what fails, since each attempt takes its time again; then "
    return f"{said} What may help: {first if fails else ''}{useful}."


def main_wait(schedule: ScheduleSummary) -> str:
    """Return for what devices wait most; empty if that is not known, or not worth a word."""
    share, bubbles = schedule.utilisation, schedule.bubbles
    if share is None or share >= GOOD_SHARE or not bubbles:
        return ""
    others = {use: part for use, part in bubbles.items() if use != "paused" and part > 0}
    return max(others or bubbles, key=lambda each: bubbles[each])


def throughput(
    load: Mapping[str, Any], waits: str = "", run: str = "RUN", *, advises: bool = True
) -> str:
    """Return one sentence: how much gets done of what could be, and where to look if it is little;
    empty before the second step.

    Args:
        waits: for what devices wait most, as `main_wait` says it.
        run: name of the run, for commands.
        advises: whether the run goes on, so that advice is of use.
    """
    now, forecast, bound = (
        load[f"{kind}samples_per_second"] for kind in ("", "forecast_", "bound_")
    )
    if now is None:
        return ""
    are = "are" if load["queues"] else "were"  # once a run is over, it has none
    pace = f"{figure(now)} samples {are} trained per second"
    if waits == "waiting_for_reward":
        return f"{pace}. {UNSCORED}"
    if forecast is None or bound is None:
        return f"{pace}; what is possible is not learned yet."
    advice = _advice(now, forecast, bound, waits).format(run=run) if advises else ""
    return (
        f"{pace}; the schedule's forecast is {figure(forecast)}, and no schedule gets beyond about "
        f"{figure(bound)} on these devices.{advice and ' '}{advice}"
    )


def _advice(now: float, forecast: float, bound: float, waits: str) -> str:
    """Return where to look if little gets done of what could be, else nothing: a schedule and
    workers are not to blame for what other services hold up."""
    is_slow = now < GOOD_PACE * forecast
    if not is_slow and forecast >= GOOD_FORECAST * bound:
        return ""
    return NO_SCHEDULE.get(waits) or (SLOWER_THAN_FORECAST if is_slow else FORECAST_BELOW_BOUND)


def unsettled(letters: Sequence[Mapping[str, Any]] | None) -> list[tuple[float, str]] | None:
    """Return when letters were found that nobody has settled, and why; None if there are none."""
    unsettled = (each for each in letters or [] if each["state"] in ("open", "over"))
    return [(each["found"], each["reason"]) for each in unsettled] or None


def late(queues: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return a line for each queue whose oldest has waited far longer than it should."""
    lines = []
    for each in queues:
        if each["late"]:
            what, means = QUEUES[each["queue"]]
            at = f" at {each['worker']}" if each["worker"] else ""
            lines.append(
                f"{each['samples']} samples {what}, the oldest{at} for "
                f"{figure(each['oldest_seconds'])} s where {figure(each['usual_seconds'])} s are "
                f"usual: {means}"
            )
    return lines


def status(run: Mapping[str, Any] | None, version: int, wanted: int) -> str:
    """Return what the run does now, by the scheduler's answer or, without one, by the store."""
    if run is None:
        if version < 0:
            return "not begun"
        return "finished" if version >= wanted else f"not running; stopped after step {version}"
    phase = str(run["phase"])
    at_failure = "; pauses at the next failure" if run["pause_at_failure"] else ""
    if phase == "running" and run["waiting_for"] != "nothing":
        return f"running, waits for {run['waiting_for']}{at_failure}"
    if phase == "waiting" and run["missing_workers"]:
        return f"waiting for a worker of: {', '.join(run['missing_workers'])}"
    return f"{phase}{at_failure}"


def slow_scorer(waits: str, workers: Sequence[Mapping[str, Any]]) -> str:
    """Return what reward workers say of their scorers, if it is rewards that devices wait for most;
    empty if they have one scorer only.

    Args:
        waits: for what devices wait most.
    """
    said = [each["note"] for each in workers if each["service"] == "reward" and each["note"]]
    return f"Scoring: {said[0]}." if said and waits == "waiting_for_reward" else ""


def alarms(
    run: Mapping[str, Any] | None,
    steps: Sequence[CommitSummary],
    evaluation: Sequence[str],
    workers: Sequence[Mapping[str, Any]] = (),
    letters: Sequence[tuple[float, str]] | None = None,
    decay_steps: int | None = None,
    *,
    is_exact: bool = True,
) -> list[str]:
    """Return a line for each thing that somebody should look at.

    Args:
        letters: when each of the newest dead letters that nobody has settled was found, by the
            Unix clock, and why it is one; None: not known.
        decay_steps: `trainer.decay_steps`.
        is_exact: whether samples are of the trainer's own weights (`rollout.weights`).
    """
    lines = [f"reward hacking? {line}" for line in evaluation]
    if run is not None and run["failure"]:
        lines.insert(0, f"the run has failed: {run['failure']}")
    if run is not None and run["missing_workers"]:
        lines.append(f"no worker of: {', '.join(run['missing_workers'])}")
    if run is not None and run["phase"] in ("running", "waiting"):
        lines += _drained(run["run"], workers)
    measured = [(step.version, step.metrics) for step in steps]
    if run is not None:
        lines += [*run["alarms"], *_letters(run, letters)]
    else:
        lines += nothing_trained(measured)
    if is_exact:
        lines += ratios_off(measured)
    lines += _not_taken(steps[-WATCHED_STEPS:])
    digests = [(step.version, step.policy.weights_digest) for step in steps]
    return [*lines, *frozen(digests, decay_steps)]


def _not_taken(steps: Sequence[CommitSummary]) -> list[str]:
    """Return which steps were not taken because their gradient was not finite."""
    found = [step.version for step in steps if step.metrics.get("skipped_not_finite")]
    if not found:
        return []
    number = f"{len(found)} of {len(steps)} steps were"
    which = f"step {found[-1]} was" if len(found) == 1 else number
    return [
        f"{which} not taken, since the gradient was not finite (the newest: {found[-1]}): try a "
        'smaller trainer.learning_rate, another model.attention, or model.dtype "bfloat16" for '
        '"float16"'
    ]


def is_failing(run: Mapping[str, Any] | None, letters: Sequence[tuple[float, str]] | None) -> bool:
    """Return whether work of a run that goes on fails now; ``letters``: as `alarms` takes them."""
    return (
        run is not None and run["phase"] == "running" and bool(letters and _letters(run, letters))
    )


def _letters(run: Mapping[str, Any], letters: Sequence[tuple[float, str]] | None) -> list[str]:
    """Return what dead letters say that nobody has settled, if there are some of the last
    minutes."""
    name, number = run["run"], run["num_dead_letters"]
    opened = f"{number} {'is' if number == 1 else 'are'} open" if number else "none is open"
    more = f"`digenrl dlq list {name}` has why"
    if letters is None:
        return [f"dead letters: {opened}; {more}"] if number else []
    ages = [time.time() - found for found, _ in letters]
    quiet = max(QUIET_S, QUIET_STEPS * (run.get("seconds_per_step") or 0.0))
    recent = max(RECENT_S, quiet)
    late = [reason for age, (_, reason) in zip(ages, letters, strict=True) if age < recent]
    if not late:
        return []
    [(reason, times)] = Counter(cause(each) for each in late).most_common(1)
    why = reason if reason.startswith("in scorer ") else f"for: {reason}"
    newest = max(0.0, min(ages))
    many = "or more " if len(late) == len(letters) >= MOST_LETTERS else ""
    came = (
        f"{len(late)} {many}dead letters, one for each attempt that fails, in the last "
        f"{recent / 60:.0f} minutes"
    )
    of_them = f"{times} of them {why}" if times < len(late) else why
    if newest > quiet:
        return []  # it seems mended
    if run["phase"] == "paused":
        if not number:
            return [f"{came}, {of_them}. The run is paused, and nothing of its batch has failed"]
        then = f"mend it, then retry: `digenrl dlq retry {name} --all --resume`"
        return [f"{came}, {of_them}. {opened}, and the run is paused: {then}"]
    if run["pause_at_failure"]:
        return [f"{came}, {of_them}. The run will be paused as soon as an attempt fails"]
    return [
        f"{came}, the last one {clock(newest)} ago, {of_them}. What fails is done up to three "
        f"times, which takes its time from all else, and is then left out of the training: mend "
        f"that first. To retry what failed, with "
        f"time for a mend: `digenrl pause {name} --at-failure`"
    ]


def _drained(run: str, workers: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return what stands still because operators have drained all who could do it."""
    there = [each for each in workers if each["service"] == "rollout"]
    if not there or any(each["drain"] == "no" for each in there):
        return []
    return [
        f"every rollout worker is drained, so nothing is generated: `digenrl workers {run} --host "
        f"{there[0]['host']} --undrain` gives them work again"
    ]


def frozen(versions: Sequence[tuple[int, str]], decay_steps: int | None = None) -> list[str]:
    """Return since when steps have left the weights as they were, if it is more than a few.

    Args:
        versions: numbers and digests of their weights, the oldest first.
        decay_steps: `trainer.decay_steps`, steps after which the learning rate is 0.
    """
    same = 0
    for _, digest in reversed(versions):
        if digest != versions[-1][1]:
            break
        same += 1
    if same <= STILL_STEPS:
        return []
    if decay_steps is not None and versions[-1][0] > decay_steps:
        return [
            f"the learning rate is 0 since step {decay_steps} (trainer.decay_steps): steps change "
            "nothing any more, and the run can end"
        ]
    first = versions[-same][0]
    since = f"{first} or an earlier one" if same == len(versions) and first else f"{first}"
    return [
        f"the weights have not changed since version {since}: steps do nothing, as where no "
        "gradient is finite, or all samples of each group have the same reward"
    ]
