"""What a case has found: each mode's measurement beside the bound, the simulator and baselines."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from bench.cluster.measured import MeasuredRun
from bench.cluster.modes import Chosen, predicted, without_hand_over
from bench.runner.figures import means
from bench.simulation.colocated import colocated_seconds
from services.scheduler.costs.floor import floor_seconds
from services.scheduler.costs.profile import Profile


@dataclass(frozen=True, slots=True, kw_only=True)
class ModeResult:
    """Seconds at full scale, unless they are said to be the emulation's."""

    mode: str
    split: str
    fragment_size: int | None
    tag: int | str
    """Groups that the trainer generates; 0 if TAG is off."""
    step_seconds: float
    """From commit to commit, median over the rounds."""
    balanced_seconds: float
    """The same with what was taken from stock, or added to it: as the simulator counts."""
    fastest: float
    slowest: float
    """Fastest and slowest round."""
    batch_seconds: list[list[float]]
    """Seconds of each measured batch of each round, from commit to commit."""
    utilisation: float
    """Work-conserving bound over step time."""
    simulated_seconds: float
    deviation: float
    """Share by which the balanced step time is above the simulator's."""
    over_2026_06: float
    over_tuned: float
    """Step time of the colocated baselines' models over this one."""
    over_colocated: float | None
    """Step time of our own colocated mode, measured beside it, over this one."""
    overhead_ms: float
    """Per batch, in the emulation: measured, less simulated with messages that take no time."""
    overhead_share: float
    """Overhead over a real batch."""
    shares: dict[str, dict[str, float]]
    """Pool -> use -> share of its device-seconds."""
    waits: dict[str, dict[str, float]]
    """Pool -> cause -> share of its device-seconds, as the scheduler sees it."""
    messages: dict[str, float]
    """Stream -> messages per batch."""
    messages_per_second: float
    """All of them, in the emulation."""
    cpu: dict[str, float]
    """Process -> cores that it kept busy."""
    overshoot_ms: float


@dataclass(frozen=True, slots=True, kw_only=True)
class CaseResult:
    workload: str
    devices: dict[str, int]
    scale: float
    floor_seconds: float
    colocated_2026_06: float
    colocated_tuned: float
    modes: list[ModeResult]


def case_result(
    profile: Profile,
    devices: Mapping[str, int],
    scale: float,
    runs: Sequence[tuple[Chosen, list[MeasuredRun]]],
) -> CaseResult:
    """Puts measurements, one per mode and round, beside bounds and models."""
    floor = floor_seconds(profile, devices)
    steps = {mode.name: _step(scale, measured) for mode, measured in runs}
    old, tuned = (colocated_seconds(profile, devices, each) for each in ("2026-06", "tuned"))
    own = steps.get("colocated")
    return CaseResult(
        workload=profile.name,
        devices=dict(devices),
        scale=scale,
        floor_seconds=floor,
        colocated_2026_06=old,
        colocated_tuned=tuned,
        modes=[
            _mode_result(profile, scale, mode, measured, floor, old, tuned, own)
            for mode, measured in runs
        ],
    )


def _mode_result(
    profile: Profile,
    scale: float,
    mode: Chosen,
    measured: Sequence[MeasuredRun],
    floor: float,
    old: float,
    tuned: float,
    own: float | None,
) -> ModeResult:
    step = _step(scale, measured)
    rounds = [scale * one.step_seconds for one in measured]
    simulated = _simulated(profile, mode, measured)
    ideal = _simulated(without_hand_over(profile), mode, measured)
    balanced = scale * median(one.balanced_seconds for one in measured)
    overhead = (balanced - ideal) / scale
    messages = means([one.messages for one in measured])
    return ModeResult(
        mode=mode.name,
        split=str(mode.split),
        fragment_size=mode.schedule.fixed_fragment,
        tag="auto" if mode.schedule.fixed_tag is None else mode.schedule.fixed_tag,
        step_seconds=step,
        balanced_seconds=balanced,
        fastest=min(rounds),
        slowest=max(rounds),
        batch_seconds=[[scale * gap for gap in one.batch_seconds] for one in measured],
        utilisation=floor / step,
        simulated_seconds=simulated,
        deviation=balanced / simulated - 1,
        over_2026_06=old / step,
        over_tuned=tuned / step,
        over_colocated=None if own is None else own / step,
        overhead_ms=1000 * overhead,
        overhead_share=overhead / step,
        shares={role: means([one.shares[role] for one in measured]) for role in measured[0].shares},
        waits={role: means([one.waits[role] for one in measured]) for role in measured[0].waits},
        messages=messages,
        messages_per_second=sum(messages.values()) * scale / step,
        cpu=means([one.cpu for one in measured]),
        overshoot_ms=max(one.overshoot_ms for one in measured),
    )


def _simulated(profile: Profile, mode: Chosen, measured: Sequence[MeasuredRun]) -> float:
    """Simulates the same batches of the same rounds, with the same service times."""
    return median(
        predicted(
            profile, mode, seed=one.seed, warm_up=one.warm_up, batches=len(one.batch_seconds)
        ).balanced_seconds
        for one in measured
    )


def _step(scale: float, measured: Sequence[MeasuredRun]) -> float:
    return scale * median(one.step_seconds for one in measured)
