"""What is asked of `python -m bench cluster`, checked, as a case."""

from dataclasses import dataclass
from typing import Literal

from bench.cluster.case import Case
from bench.cluster.modes import MODES, chosen
from bench.cluster.setting import default_scale
from bench.devices import parse_devices
from bench.stored import RENAMED_MODES
from digenrl.planning.runnable import why_not
from services.scheduler.costs.profile import Profile, load_profile
from services.scheduler.costs.split import Devices, Split
from shared.errors import UserError
from shared.recipe.schedule import RunSchedule

WORKLOADS = {
    "qwen-image": "qwen-image",
    "flux": "flux1-dev",
    "wan": "wan2.1-14b",
    "hunyuan": "hunyuanvideo",
}
"""Workload -> cost profile."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What one case is to be. None leaves a choice open: the planner's, or the usual scale."""

    workload: str
    pool: str = "h100=32"
    split: str | None = None
    """rollout:trainer, in devices of the first kind."""
    modes: tuple[str, ...] = tuple(MODES)
    tag: str = "planned"
    """Groups of a batch that the trainer generates: planned, auto (as its controller learns them),
    off, or a number."""
    fragment_size: int | None = None
    rounds: int = 2
    batches: int = 3
    one_step_batches: int = 12
    scale: float | None = None

    def case(self) -> Case:
        """Plans splits and fragment sizes, which takes seconds.

        Raises:
            UserError: one line that names the option and the remedy.
        """
        if self.workload not in WORKLOADS:
            known = ", ".join(WORKLOADS)
            raise UserError(f"--workload: no {self.workload}; known are {known}")
        profile = load_profile(WORKLOADS[self.workload])
        devices = parse_devices("--pool", self.pool, profile)
        split = None if self.split is None else _split(self.split, devices)
        schedules = {name: self._schedule(name) for name in self.modes}
        if split is not None:
            for name, schedule in schedules.items():
                _check(name, profile, split, schedule)
        return Case(
            profile=profile,
            devices=devices,
            scale=self.scale or default_scale(profile, devices),
            modes=tuple(
                chosen(name, schedule, profile, devices, split, by_controller=self.tag == "auto")
                for name, schedule in schedules.items()
            ),
            rounds=self.rounds,
            batches=self.batches,
            one_step_batches=self.one_step_batches,
        )

    def _schedule(self, name: str) -> RunSchedule:
        if name in RENAMED_MODES:
            raise UserError(f"--mode: {name} is renamed to {RENAMED_MODES[name]}")
        if name not in MODES:
            raise UserError(f"--mode: no {name}; known are {', '.join(MODES)}")
        schedule = MODES[name].changed(fragment_size=self.fragment_size or "auto")
        if schedule.trainer_generates and schedule.mode == "disaggregated":
            schedule = schedule.changed(tag=self._tag())
        return schedule

    def _tag(self) -> int | Literal["auto"]:
        if self.tag in ("planned", "auto", "off"):
            return 0 if self.tag == "off" else "auto"
        if not self.tag.isdecimal():
            raise UserError(f"--tag: {self.tag!r} is neither planned, auto, off nor a number")
        return int(self.tag)


def _check(name: str, profile: Profile, split: Split, schedule: RunSchedule) -> None:
    """Raises UserError if no recipe says such a row."""
    if schedule.mode == "colocated":
        return  # on all devices, whatever the split
    reason = why_not(profile, split, schedule)
    if reason is not None:
        raise UserError(f"--split: {split} with --mode {name}: {reason}; see bench rows")


def _split(text: str, devices: Devices) -> Split:
    """Parses the split of equal devices."""
    rollout, colon, trainer = text.partition(":")
    if not colon or not rollout.isdecimal() or not trainer.isdecimal():
        raise UserError(f"--split: {text!r} is not rollout:trainer, e.g. 8:24")
    if len(devices) > 1:
        raise UserError("--split: unequal devices are split by the planner; leave it out")
    [(kind, number)] = devices.items()
    if int(rollout) + int(trainer) != number or not int(rollout) or not int(trainer):
        raise UserError(f"--split: {text} is not a split of {number} devices")
    return Split({kind: int(rollout)}, {kind: int(trainer)})


def modes_of(text: str) -> tuple[str, ...]:
    """Splits ``sequential,gap``; "all" is every mode."""
    return tuple(MODES) if text == "all" else tuple(name.strip() for name in text.split(","))
