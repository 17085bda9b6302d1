"""Finds conditions that need attention: failures, dead letters, late queues, steps without
effect."""

from collections import Counter
from collections.abc import Sequence

from digenrl.reading.facts import MAX_LETTERS, RunFacts, StepFacts
from digenrl.reading.wording import QUEUES, cause, clock, figure
from services.scheduler.shell.api_letters import DeadLetterView
from services.scheduler.shell.api_load import QueueView
from services.scheduler.shell.api_models import WorkerView
from shared.learning.metrics import ratios_off

LETTER_NEWS_S = 120.0
"""Seconds for which a dead letter is an alarm: afterwards only lists have it."""
MIN_QUIET_S = 20.0
QUIET_STEPS = 1.5
"""Seconds, and steps, without a further dead letter after which the failure seems to be fixed."""
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
        *([f"the run has failed: {run.failure}"] if run.failure else []),
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


def num_open_letters(facts: RunFacts) -> int:
    """Return the number of open dead letters: from the letters themselves if all are known, so that
    number and reasons belong to one moment."""
    if facts.letters is None or len(facts.letters) >= MAX_LETTERS:
        return facts.run.num_dead_letters
    return sum(each.state == "open" for each in facts.letters)


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


def _letters(facts: RunFacts) -> list[str]:
    """Return reports of unsettled dead letters of the last minutes."""
    run, name, number = facts.run, facts.run.run, num_open_letters(facts)
    opened = f"{number} {'is' if number == 1 else 'are'} open" if number else "none is open"
    if facts.letters is None:
        return [f"dead letters: {opened}; `digenrl dlq list {name}` has why"] if number else []
    letters = [each for each in facts.letters if each.state in ("open", "over")]
    quiet = max(MIN_QUIET_S, QUIET_STEPS * (run.seconds_per_step or 0.0))
    recent = max(LETTER_NEWS_S, quiet)
    new = [each for each in letters if facts.at - each.found < recent]
    newest = max(0.0, min((facts.at - each.found for each in new), default=0.0))
    if not new or newest > quiet:
        return []
    many = "or more " if len(new) == len(letters) >= MAX_LETTERS else ""
    came = (
        f"{len(new)} {many}dead letters, one for each attempt that fails, in the last "
        f"{recent / 60:.0f} minutes"
    )
    why = _most_frequent(new)
    if run.phase == "paused":
        if not number:
            return [f"{came}, {why}. The run is paused, and nothing of its batch has failed"]
        then = f"mend it, then retry: `digenrl dlq retry {name} --all --resume`"
        return [f"{came}, {why}. {opened}, and the run is paused: {then}"]
    if run.pause_at_failure:
        return [f"{came}, {why}. The run will be paused as soon as an attempt fails"]
    return [
        f"{came}, the last one {clock(newest)} ago, {why}. What fails is done up to three "
        f"times, which takes its time from all else, and is then left out of the training: mend "
        f"that first. To retry what failed, with "
        f"time for a mend: `digenrl pause {name} --at-failure`"
    ]


def _most_frequent(letters: Sequence[DeadLetterView]) -> str:
    """Return the most frequent reason, and how many letters have it unless all do."""
    [(reason, times)] = Counter(cause(each.reason) for each in letters).most_common(1)
    why = reason if reason.startswith("in scorer ") else f"for: {reason}"
    return f"{times} of them {why}" if times < len(letters) else why


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
