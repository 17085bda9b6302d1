"""Says in a sentence what a run does, what holds it up, and what would help."""

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from digenrl.report.summary import ScheduleSummary
from digenrl.view.words import QUEUES, clock
from services.scheduler.core.usage import BUSY
from shared.learning.metrics import ALARMING_RATIO_ERROR
from shared.run.chain import Step

RECENT_S = 600.0
"""Seconds for which a dead letter is news: afterwards only lists have it."""
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
    "to the slowest worker (`digenrl workers RUN`), then to restarts (`digenrl logs RUN`)."
)
FORECAST_BELOW_BOUND = (
    "The schedule leaves devices idle: another split, schedule.tag or schedule.max_staleness may "
    "help."
)

REMEDIES: Mapping[str, tuple[str, str]] = {
    "waiting_for_rollout": (
        "for generation",
        'more rollout devices, or schedule.tag = "auto" so that the trainer\'s devices help',
    ),
    "waiting_for_trainer": (
        "for the trainer",
        "schedule.max_staleness = 1, rollout.can_train = true, or more trainer devices",
    ),
    "waiting_for_reward": (
        "for rewards",
        "a faster scorer, or more reward.workers (a run that is ended and resumed takes another "
        "number: `digenrl up RECIPE --resume --reward.workers N`)",
    ),
    "tail": (
        "at the end of a batch for the slowest device",
        'a smaller schedule.fragment_size, or "auto"',
    ),
    "waiting_for_weights": ("for new weights", "a faster network or a shared host cache"),
    "waiting_for_conditions": ("for encoded prompts", "more encoder.workers"),
    "paused": ("because the run is paused", "resume it"),
}


def bottleneck(schedule: ScheduleSummary) -> str:
    """Return one sentence: for what devices wait most, and which setting may change that."""
    if schedule.utilisation is None or not schedule.bubbles:
        return "What devices wait for is known after the second batch."
    share = schedule.utilisation
    if share >= GOOD_SHARE:
        return f"Rollout and trainer devices are at work {share:.0%} of their time."
    use = max(schedule.bubbles, key=lambda each: schedule.bubbles[each])
    what, remedy = REMEDIES.get(use, (use.replace("_", " "), "see the timeline"))
    return (
        f"Rollout and trainer devices are at work {share:.0%} of their time; most of the rest, "
        f"{schedule.bubbles[use]:.0%}, they wait {what}. What may help: {remedy}."
    )


def throughput(load: Mapping[str, Any]) -> str:
    """Return one sentence: how much gets done of what could be, and where to look if it is little;
    empty before the second step."""
    now, forecast, bound = (
        load[f"{kind}samples_per_second"] for kind in ("", "forecast_", "bound_")
    )
    if now is None:
        return ""
    are = "are" if load["queues"] else "were"  # once a run is over, it has none
    if forecast is None or bound is None:
        return f"{now:.3g} samples {are} trained per second; what is possible is not learned yet."
    said = (
        f"{now:.3g} samples {are} trained per second; the schedule's forecast is {forecast:.3g}, "
        f"and no schedule gets beyond about {bound:.3g} on these devices."
    )
    if now < GOOD_PACE * forecast:
        return f"{said} {SLOWER_THAN_FORECAST}"
    if forecast < GOOD_FORECAST * bound:
        return f"{said} {FORECAST_BELOW_BOUND}"
    return said


def late(queues: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return a line for each queue whose oldest has waited far longer than it should."""
    lines = []
    for each in queues:
        if each["late"]:
            what, means = QUEUES[each["queue"]]
            at = f" at {each['worker']}" if each["worker"] else ""
            lines.append(
                f"{each['samples']} samples {what}, the oldest{at} for {each['oldest_seconds']:.3g}"
                f" s where {each['usual_seconds']:.3g} s are usual: {means}"
            )
    return lines


def status(run: Mapping[str, Any] | None, version: int, wanted: int) -> str:
    """Return what the run does now, by the scheduler's answer or, without one, by the store."""
    if run is None:
        if version < 0:
            return "not begun"
        return "finished" if version >= wanted else f"not running; stopped after step {version}"
    phase = str(run["phase"])
    if phase == "running" and run["waiting_for"] != "nothing":
        return f"running, waits for {run['waiting_for']}"
    if phase == "waiting" and run["missing_workers"]:
        return f"waiting for a worker of: {', '.join(run['missing_workers'])}"
    return phase


def alarms(
    run: Mapping[str, Any] | None,
    steps: Sequence[Step],
    evaluation: Sequence[str],
    workers: Sequence[Mapping[str, Any]] = (),
    letters: Sequence[tuple[float, str]] | None = None,
) -> list[str]:
    """Return a line for each thing that somebody should look at.

    Args:
        letters: when each of the newest open dead letters was found, by the Unix clock, and why it
            is one; None: not known.
    """
    lines = [f"reward hacking? {line}" for line in evaluation]
    if run is not None and run["failure"]:
        lines.insert(0, f"the run has failed: {run['failure']}")
    if run is not None and run["missing_workers"]:
        lines.append(f"no worker of: {', '.join(run['missing_workers'])}")
    if run is not None and run["phase"] in ("running", "waiting"):
        lines += _drained(workers)
    if run is not None and run["num_dead_letters"]:
        lines += _letters(run["run"], run["num_dead_letters"], letters)
    errors = {step.version: step.metrics.get("onpolicy_ratio_error", 0.0) for step in steps}
    if errors and (worst := max(errors.values())) > ALARMING_RATIO_ERROR:
        version = next(version for version, error in errors.items() if error == worst)
        lines.append(
            f"on-policy ratios were off by {worst:.2g} in step {version}: rollout and trainer "
            "compute different values from the same weights"
        )
    return [*lines, *frozen([(step.version, step.policy.weights_digest) for step in steps])]


def _letters(run: str, number: int, letters: Sequence[tuple[float, str]] | None) -> list[str]:
    """Return what the open dead letters say, if there are some of the last minutes."""
    are = "dead letter is" if number == 1 else "dead letters are"
    line = f"{number} {are} open: `digenrl dlq list {run}` has why"
    if letters is None:
        return [line]
    ages = [time.time() - found for found, _ in letters]
    late = [reason for age, (_, reason) in zip(ages, letters, strict=True) if age < RECENT_S]
    if not late:
        return []
    [(reason, times)] = Counter(late).most_common(1)
    return [
        f"{line}; {len(late)} came in the last {RECENT_S // 60:.0f} minutes, the last one "
        f"{clock(max(0.0, min(ages)))} ago, {times} of them for: {reason}. What fails is done up "
        "to three times, which takes its time from all else"
    ]


def _drained(workers: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return what stands still because operators have drained all who could do it."""
    there = [each for each in workers if each["service"] == "rollout"]
    if not there or any(each["drain"] == "no" for each in there):
        return []
    return [
        "every rollout worker is drained, so nothing is generated: `digenrl workers RUN --host "
        "HOST --undrain`, or the page of workers, gives them work again"
    ]


def frozen(versions: Sequence[tuple[int, str]]) -> list[str]:
    """Return since when steps have left the weights as they were, if it is more than a few.

    Args:
        versions: numbers and digests of their weights, the oldest first.
    """
    same = 0
    for _, digest in reversed(versions):
        if digest != versions[-1][1]:
            break
        same += 1
    if same <= STILL_STEPS:
        return []
    return [
        f"the weights have not changed since version {versions[-same][0]}: if "
        "trainer.decay_steps has brought the learning rate to 0, the run can end"
    ]


def is_busy(use: str | None) -> bool:
    """Whether a device works that does this."""
    return use in BUSY
