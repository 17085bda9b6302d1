"""Finds conditions that need attention: failures, dead letters, late queues, steps without
effect."""

from collections.abc import Sequence

from digenrl.reading.facts import RunFacts, StepFacts
from digenrl.reading.letters import advice, reasons
from digenrl.reading.wording import QUEUES, clock, figure
from services.scheduler.shell.api_letters import DeadLetterView
from services.scheduler.shell.api_load import QueueView
from services.scheduler.shell.api_models import RunView, WorkerView
from shared.learning.metrics import ratios_off

LETTER_NEWS_S = 60.0
QUIET_STEPS = 1.5
"""Seconds, and steps, for which a dead letter is an alarm: afterwards only lists have it."""
WATCHED_STEPS = 20
"""Number of recent steps checked for skipped updates."""
MAX_UNCHANGED_STEPS = 4
"""Number of steps in a row that may leave the weights unchanged without an alarm."""


def alarms(facts: RunFacts) -> list[str]:
    """Return a line for each condition that needs attention."""
    run, recipe = facts.run, facts.recipe
    measured = [(step.version, step.metrics) for step in facts.steps]
    is_exact = recipe is None or recipe.largest_weight is None
    evaluated = facts.evaluations[-1].alarms if facts.evaluations else []
    return [
        *([_failure(run, facts.letters or ())] if run.failure else []),
        *(f"reward hacking? {line}" for line in evaluated),
        *([f"no worker of: {', '.join(run.missing_workers)}"] if run.missing_workers else []),
        *(_drained(run.run, facts.workers) if run.phase in ("running", "waiting") else []),
        *run.alarms,
        *(_letters(facts) if facts.is_live else []),
        *(ratios_off(measured) if is_exact else []),
        *_skipped(facts.steps[-WATCHED_STEPS:]),
        *_unchanged(facts.steps, None if recipe is None else recipe.trainer.decay_steps),
        *(late(facts.load.queues) if facts.load else []),
    ]


def is_failing(facts: RunFacts) -> bool:
    """Return whether work of a run in progress fails now."""
    is_known = facts.letters is not None
    return facts.is_live and facts.run.phase == "running" and is_known and bool(_letters(facts))


def cause_of(letters: Sequence[DeadLetterView]) -> str:
    """Return the most frequent reason of open letters, for which a run fails; empty without any."""
    return next((why for why, _ in reasons([e for e in letters if e.state == "open"])), "")


def _failure(run: RunView, letters: Sequence[DeadLetterView]) -> str:
    """Return why the run has failed, and the command that prints the log line."""
    failure, cause = run.failure or "", cause_of(letters)
    because = f", because of {cause}" if cause and cause not in failure else ""
    return f"the run has failed: {failure}{because}; see `digenrl logs {run.run} --level error`"


def late(queues: Sequence[QueueView]) -> list[str]:
    """Return a line for each queue whose oldest sample has waited far longer than usual."""
    lines = []
    for each in queues:
        if each.late:
            what, means = QUEUES[each.queue]
            at = f" at {each.worker}" if each.worker else ""
            lines.append(
                f"{each.samples} samples {what}, the oldest{at} for "
                f"{figure(each.oldest_seconds or 0.0)} s where {figure(each.usual_seconds or 0.0)} "
                f"s are usual: {means}"
            )
    return lines


def _skipped(steps: Sequence[StepFacts]) -> list[str]:
    """Return which steps were skipped because their gradient was not finite."""
    versions = [step.version for step in steps if step.metrics.get("skipped_not_finite")]
    if not versions:
        return []
    number = f"{len(versions)} of {len(steps)} steps were"
    which = f"step {versions[-1]} was" if len(versions) == 1 else number
    return [
        f"{which} not taken, since the gradient was not finite (the newest: {versions[-1]}): try a "
        'smaller trainer.learning_rate, another model.attention, or model.dtype "bfloat16" for '
        '"float16"'
    ]


def _letters(facts: RunFacts) -> list[str]:
    """Return a report of dead letters while they come, with the remedy."""
    run, number = facts.run, facts.run.num_dead_letters
    if facts.letters is None:
        opened = f"{number} {'is' if number == 1 else 'are'} open"
        return [f"dead letters: {opened}; `digenrl dlq list {run.run}` has why"] if number else []
    recent = max(LETTER_NEWS_S, QUIET_STEPS * (run.seconds_per_step or 0.0))
    new = [
        each for each in facts.letters
        if each.state in ("open", "over") and facts.at - each.found < recent
    ]  # fmt: skip
    if not new:
        return []
    why, times = reasons(new)[0]
    return [
        f"{len(new)} dead letters in the last {clock(recent)}, {times} of them: {why}; "
        f"{advice(run)}"
    ]


def _drained(run: str, workers: Sequence[WorkerView]) -> list[str]:
    """Return what has stopped because operators have drained all rollout workers."""
    rollout = [each for each in workers if each.service == "rollout"]
    if not rollout or any(each.drain == "no" for each in rollout):
        return []
    return [
        f"every rollout worker is drained, so nothing is generated: `digenrl workers {run} --host "
        f"{rollout[0].host} --undrain` gives them work again"
    ]


def _unchanged(steps: Sequence[StepFacts], decay_steps: int | None) -> list[str]:
    """Return since when steps have left the weights unchanged, if it is more than a few.

    Args:
        decay_steps: `trainer.decay_steps`, steps after which the learning rate is 0.
    """
    same = 0
    for step in reversed(steps):
        if step.weights_digest != steps[-1].weights_digest:
            break
        same += 1
    if same <= MAX_UNCHANGED_STEPS:
        return []
    if decay_steps is not None and steps[-1].version > decay_steps:
        return [
            f"the learning rate is 0 since step {decay_steps} (trainer.decay_steps): steps change "
            "nothing any more, and the run can end"
        ]
    first = steps[-same].version
    since = f"{first} or an earlier one" if same == len(steps) and first else f"{first}"
    return [
        f"the weights have not changed since version {since}: steps do nothing, as where no "
        "gradient is finite, or all samples of each group have the same reward"
    ]
