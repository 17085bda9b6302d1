"""Decides for every batch how many groups members generate at most, and learns from the outcome.

decide    warm-up: the first batches run without help, as evidence for the guard
          the first help is one group, since its cost is unknown
          then the model's optimum, if it gains enough
          probe: while help is off, one group now and then keeps its cost known
observe   measured over modelled seconds, separately with and without help
          guard: help that has cost time stays off until it would have paid for that
"""

import math
from dataclasses import dataclass, replace
from typing import Literal

from services.scheduler.core.tag.estimates import Estimate
from services.scheduler.core.tag.makespan import TagInputs, best_groups, makespan

Mode = Literal["auto", "off", "fixed"]
Reason = Literal[
    "scan", "hysteresis: kept", "gain below threshold", "warm-up", "probe",
    "guard: off is faster", "off", "fixed", "share",
]  # fmt: skip

WARM_UP = 2
"""Batches without help before the first with it."""
HYSTERESIS = 0.01
"""Largest predicted gain that changes nothing."""
MAX_THRESHOLD = 0.02
"""However noisy batches are, keeping a plan may cost no more than this."""
PROBE_EVERY = 25
"""Batches without help between probes."""
PROBE_LOSS = 0.003
"""Predicted loss that a probe may have, per batch since members helped: 7.5 % after 25. With a
fixed limit, a switch that was slow once would count as slow from then on."""
PROBE_TOLERANCE = 0.1
"""A probe that was this much faster than predicted is repeated, since an estimate treats a single
observation as an outlier; after one that was this much slower, the next is put off."""
MAX_LOSS_BATCHES = 0.25
"""Time lost before the guard acts, in batches: one bad surprise, or a slow drain."""
MAX_DEBT = 10.0
"""Largest gain, in batches, that help must promise before it is tried again."""
MAX_SETBACKS = 6
"""Most setbacks that are counted; each doubles the debt."""
CLEAN_BATCHES_TO_RESET = 10
"""Batches with help and without a setback after which debts are small again."""
BIAS_PRIOR = Estimate(spread=0.05, alpha=0.2)
"""Prior of measured over modelled seconds: batches differ by some per cent."""
MAX_BIAS = 2.0
"""Largest bias, or its inverse; beyond it, the costs were unknown rather than the model wrong."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TagDecision:
    groups: int
    """Groups that members generate."""
    reason: Reason
    predicted_seconds: float | None
    """Seconds of the batch; None if no device would generate some of it."""
    predicted_seconds_off: float | None
    """Seconds of the batch without help."""

    @property
    def predicted_gain(self) -> float | None:
        """Gain over the batch without help, which takes 10 % longer at 0.1."""
        if self.predicted_seconds_off is None or not self.predicted_seconds:
            return None
        return self.predicted_seconds_off / self.predicted_seconds - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Controller:
    mode: Mode = "auto"
    groups: int = 0
    """Groups per batch in mode fixed."""
    plan: int = 0
    """Groups of the plan in force; a probe is not one."""
    gain: float = 0.0
    """Predicted gain of the newest decision."""
    off: Estimate = BIAS_PRIOR
    """Bias of batches without help."""
    on: Estimate = BIAS_PRIOR
    """Bias of batches with help."""
    tried: bool = False
    """Whether help has been measured since it was last ruled out."""
    idle: int = PROBE_EVERY - WARM_UP
    """Batches since members helped; initially long ago."""
    harm: float = 0.0
    """Time that recent batches with help lost against batches without, in batches."""
    debt: float = 0.0
    """Time, in batches, that the promised gains of help must add up to before the guard lets it on
    again: what it lost, doubled by every further setback."""
    setbacks: int = 0
    """How often the guard has acted in a row."""
    quiet: int = 0
    """Batches with help since then."""


TagChoice = tuple[int, Reason]


def decide(controller: Controller, tag_inputs: TagInputs) -> tuple[Controller, TagDecision]:
    """Decide how many groups members generate in the batch that opens."""
    groups, reason = _choose(controller, tag_inputs)
    decision = TagDecision(
        groups=groups,
        reason=reason,
        predicted_seconds=_finite(_predict(controller, tag_inputs, groups)),
        predicted_seconds_off=_finite(_predict(controller, tag_inputs, 0)),
    )
    plan = 0 if reason == "probe" else groups
    return replace(controller, plan=plan, gain=decision.predicted_gain or 0.0), decision


def _choose(controller: Controller, tag_inputs: TagInputs) -> TagChoice:
    match controller.mode:
        case "off":
            return 0, "off"
        case "fixed":
            return min(controller.groups, tag_inputs.groups), "fixed"
        case "auto":
            pass
    if math.isinf(makespan(tag_inputs, 0)):
        return best_groups(tag_inputs), "scan"  # nobody else generates
    if controller.off.count < WARM_UP:
        return 0, "warm-up"
    if controller.debt:
        return 0, "guard: off is faster"
    groups, reason = _adopted(controller, tag_inputs)
    if not controller.tried if groups else _is_probe_due(controller, tag_inputs):
        return 1, "probe"
    return groups, reason


def _adopted(controller: Controller, tag_inputs: TagInputs) -> TagChoice:
    """The best plan, if it is sufficiently better than the current one."""
    old = min(controller.plan, tag_inputs.groups)
    new = best_groups(tag_inputs)
    gain = _predicted_gain(controller, tag_inputs, old, new)
    if _predicted_gain(controller, tag_inputs, old, 0) > max(HYSTERESIS, gain):
        return 0, "scan"
    if new == old or gain > _threshold(controller):
        return new, "scan"
    return old, "hysteresis: kept" if gain <= HYSTERESIS else "gain below threshold"


def _threshold(controller: Controller) -> float:
    """Gain beyond noise: twice the standard error of the learned biases."""
    return max(HYSTERESIS, min(MAX_THRESHOLD, 2 * _bias_error(controller)))


def _is_probe_due(controller: Controller, tag_inputs: TagInputs) -> bool:
    if not tag_inputs.trainer_queues or controller.idle < PROBE_EVERY:
        return False
    loss = -_predicted_gain(controller, tag_inputs, 0, 1)
    return loss <= PROBE_LOSS * controller.idle


def _predicted_gain(controller: Controller, tag_inputs: TagInputs, old: int, new: int) -> float:
    """How much longer the old plan takes, relative to the new one."""
    seconds = _predict(controller, tag_inputs, new)
    if math.isinf(seconds) or not seconds:
        return 0.0
    return _predict(controller, tag_inputs, old) / seconds - 1


def _predict(controller: Controller, tag_inputs: TagInputs, groups: int) -> float:
    """Modelled seconds, corrected by what comparable batches have taken."""
    excess = _unmodelled_cost(controller)
    if controller.plan and controller.on.value:
        bias = controller.on.value if groups else controller.on.value / excess
    else:
        bias = controller.off.value or 1.0
        bias = bias * excess if groups else bias
    return bias * makespan(tag_inputs, groups)


def _finite(seconds: float) -> float | None:
    return None if math.isinf(seconds) else seconds


def _unmodelled_cost(controller: Controller) -> float:
    """Factor for time of help that the model does not know; 1 unless it is significant."""
    if not controller.on.value or not controller.off.value:
        return 1.0
    ratio = math.log(controller.on.value / controller.off.value)
    beyond = max(0.0, abs(ratio) - 2 * _bias_error(controller))
    return math.exp(math.copysign(beyond, ratio))


def _bias_error(controller: Controller) -> float:
    """Standard error of the ratio of the two biases."""
    return math.hypot(_standard_error(controller.on), _standard_error(controller.off))


def _standard_error(bias: Estimate) -> float:
    most = (2 - bias.alpha) / bias.alpha  # observations that an exponential average is worth
    return bias.spread / math.sqrt(max(1.0, min(bias.count, most)))


def observe(
    controller: Controller, tag_inputs: TagInputs, groups_used: int, measured_seconds: float
) -> Controller:
    """Learn from a batch in which members generated ``groups_used`` groups.

    ``tag_inputs``: the batch with the costs measured in it (`Costs.as_measured`), not the costs at
    the decision. Otherwise help would be blamed for a batch that was slow for another reason, and
    the model for a cost that was not known yet.
    """
    modelled, modelled_off = makespan(tag_inputs, groups_used), makespan(tag_inputs, 0)
    if min(modelled, modelled_off) <= 0 or math.isinf(modelled):
        return controller
    ratio = min(MAX_BIAS, max(1 / MAX_BIAS, measured_seconds / modelled))
    if not groups_used:
        return replace(
            controller,
            off=controller.off.observe(ratio),
            idle=controller.idle + 1,
            harm=0.0,
            debt=_paid(controller.debt, tag_inputs),
        )
    loss = measured_seconds / (modelled_off * (controller.off.value or 1.0)) - 1
    surprise = loss - max(0.0, 1 / (1 + controller.gain) - 1)
    controller = replace(
        controller,
        on=controller.on.observe(ratio),
        tried=True,
        idle=_idle_after_help(controller, surprise),
    )
    return _guarded(controller, surprise)


def _paid(debt: float, tag_inputs: TagInputs) -> float:
    """Debt left after a batch in which help would have gained what the model promises."""
    if not debt:
        return 0.0
    gain = makespan(tag_inputs, 0) / makespan(tag_inputs, best_groups(tag_inputs)) - 1
    return max(0.0, debt - max(HYSTERESIS, gain))


def _idle_after_help(controller: Controller, surprise: float) -> int:
    """Batches without help to count after one with help, towards the next probe."""
    if controller.plan:
        return 0
    if surprise < -PROBE_TOLERANCE:
        return controller.idle
    return -PROBE_EVERY if surprise > PROBE_TOLERANCE else 0


def _guarded(controller: Controller, surprise: float) -> Controller:
    """Update the guard after a batch that lost this much against batches without help."""
    harm = max(0.0, controller.harm + surprise)
    if harm < MAX_LOSS_BATCHES:
        quiet = controller.quiet + 1
        setbacks = 0 if quiet >= CLEAN_BATCHES_TO_RESET else controller.setbacks
        return replace(controller, harm=harm, quiet=quiet, setbacks=setbacks)
    return replace(
        controller,
        plan=0,
        tried=False,
        harm=0.0,
        debt=min(MAX_DEBT, harm * 2**controller.setbacks),
        setbacks=min(controller.setbacks + 1, MAX_SETBACKS),
        quiet=0,
    )
