"""A cost profile in the simulated cluster: what a schedule makes of a split of devices.

Whole groups are trained as a fluid: with TSP a data-parallel rank takes (sample, step) rows on its
own and exchanges gradients in the batch's last backward pass only, so a rank that is done with its
rows of one group goes on with the next, and no group waits for its slowest share. Without TSP ranks
take whole samples of one group at a time: 16 samples on 10 devices take as long as on 8.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from services.scheduler.assign import full_size
from services.scheduler.costs.floor import floor_seconds
from services.scheduler.costs.profile import (
    Profile,
    Role,
    fits,
    fragment_seconds,
    speed,
    train_group_seconds,
)
from services.scheduler.sim.cluster import Cluster, build
from services.scheduler.sim.history import Use
from services.scheduler.sim.scheduler import LookAhead
from services.scheduler.sim.timing import Timing
from services.scheduler.state import Plan, State, Tag
from services.scheduler.tag.controller import Controller
from services.scheduler.tag.estimates import Costs, Estimate
from services.scheduler.usage import BUSY, Meter, uses
from services.scheduler.usage import Use as Cause
from shared import subjects
from shared.contracts import FragmentGenerated, Prompt, TrainGroup
from shared.errors import UserError
from shared.prompts import PromptOrder

Devices = Mapping[str, int]
Bubble = Cause | Literal["remainder"]
"""remainder: hand-over of messages, and devices that have no part of what their pool does."""

NEVER = 1e12
"""Seconds: longer than any simulation. A loan that runs out is a fault, and there are none here."""
WARM_UP_STRICT, WARM_UP_ONE_STEP, WARM_UP_AUTO = 0, 4, 8
"""Batches until one is like the next: a strict batch begins from nothing like any other, one-step
asynchrony builds up its lead first, and the controller of TAG looks on before it acts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleChoice:
    """How the devices are kept busy (`shared.recipe.Schedule`, in the simulator's terms)."""

    mode: Literal["pipelined", "naive"] = "pipelined"
    fragment_size: int | None = None
    """None: cut by the core for the devices at hand."""
    tsp: bool = True
    tag: int | Literal["auto"] = 0
    """Groups of a batch that the trainer may generate. auto: the controller decides."""
    max_staleness: Literal[0, 1] = 0
    early_fraction: float = 1.0
    """Of the next batch's groups, how many may be begun early."""

    @property
    def may_help(self) -> bool:
        return self.mode == "pipelined" and self.tag != 0

    @property
    def warm_up(self) -> int:
        """Batches that are not measured."""
        if self.may_help and self.tag == "auto":
            return WARM_UP_AUTO
        return WARM_UP_ONE_STEP if self.max_staleness else WARM_UP_STRICT


@dataclass(frozen=True, slots=True, kw_only=True)
class TagBatch:
    """What TAG decided for a batch, and what came of it."""

    batch: int
    groups: int
    """At most."""
    reason: str
    samples: int
    """That the trainer generated."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulated:
    step_seconds: float
    """Per batch, mean over the measured ones."""
    floor_seconds: float
    busy: Mapping[Role, Mapping[Use, float]]
    """Pool -> use -> share of its device-seconds."""
    bubbles: Mapping[Role, Mapping[Bubble, float]]
    """Pool -> cause -> share of its device-seconds."""
    tag: tuple[TagBatch, ...]
    staleness: Mapping[int, float]
    """Share of the trained groups."""
    discarded: float
    """Samples that were generated and not trained, over those that were trained."""

    @property
    def utilisation(self) -> float:
        """Bound over time: 1 if no device ever waited and nothing but work took time."""
        return self.floor_seconds / self.step_seconds


def simulate(
    profile: Profile,
    *,
    rollout: Devices,
    trainer: Devices,
    schedule: ScheduleChoice,
    batches: int = 8,
    seed: int | None = 0,
    look_ahead: LookAhead | None = None,
    causes: bool = True,
) -> Simulated:
    """Run so many batches, after those of the warm-up, on these devices.

    ``seed``: of the profile's noise; None leaves it out, and every batch is like the next.
    ``causes``: whether to find out why devices wait, which takes a third more time.

    Raises:
        UserError: a pool without devices, or one that cannot hold the model.
    """
    for role, devices in (("rollout", rollout), ("trainer", trainer)):
        _check_pool(profile, role, devices)  # type: ignore[arg-type]
    cluster = _cluster(profile, rollout, trainer, schedule, batches, seed, look_ahead)
    watch = _Watch(cluster, schedule.warm_up, batches, causes)
    if not cluster.world.run(NEVER, watch.is_done):
        raise RuntimeError(f"the simulated run stood still: {cluster.scheduler.state.failure}")
    window = cluster.history.commit_times[-1] - watch.since
    busy = {
        "rollout": _busy_rollout(watch, window * sum(rollout.values())),
        "trainer": _busy_trainer(watch, window, profile, trainer, cluster.timing),
    }
    commits = cluster.commits.versions[schedule.warm_up + 1 :]
    return Simulated(
        step_seconds=window / batches,
        floor_seconds=floor_seconds(profile, _together(rollout, trainer)),
        busy=busy,  # type: ignore[arg-type]
        bubbles=_bubbles(watch, window, busy, sum(rollout.values())) if causes else {},  # type: ignore[arg-type]
        tag=_tag_batches(cluster),
        staleness=_staleness([group for commit in commits for group in commit.trained]),
        discarded=_discarded(cluster),
    )


def prime(cluster: Cluster, costs: Costs) -> None:
    """Let the scheduler begin with costs it would have learned. Rollout costs go by kind."""
    rollout = {
        worker.address: costs.rollout[worker.kind] for worker in cluster.rollout.values()
    }
    scheduler = cluster.scheduler
    scheduler.state = replace(scheduler.state, costs=replace(costs, rollout=rollout))


def steady_plan(
    *, groups: int, group_size: int, batches: int, schedule: ScheduleChoice
) -> Plan:
    """A run's plan with nothing in it but its shape."""
    early = max(1, int(schedule.early_fraction * groups)) if schedule.max_staleness else 0
    return Plan(
        prompts=PromptOrder((Prompt(text="simulated"),), 0),
        num_batches=batches,
        num_groups=groups,
        group_size=group_size,
        window_starts=(0, 0),
        seed=0,
        mode=schedule.mode,
        fragment_size=schedule.fragment_size,
        max_staleness=schedule.max_staleness,
        early_groups=early,
        loan_seconds=NEVER,
    )


def controller_of(schedule: ScheduleChoice) -> Controller:
    if not schedule.may_help:
        return Controller.of("off")
    return Controller.of("auto") if schedule.tag == "auto" else Controller.of("fixed", schedule.tag)


def timing_of(
    profile: Profile, trainer: Devices, *, tsp: bool = True, noise: bool = False
) -> Timing:
    """The profile's seconds. Scoring is part of a fragment's, as in the profile."""
    variant, shape = profile.variant, profile.shape
    rate = sum(count * speed(profile, kind, "trainer") for kind, count in trainer.items())
    fluid = profile.training_work / shape.groups / rate
    group = fluid if tsp else train_group_seconds(profile, trainer, tsp=False)
    return Timing(
        fragment=lambda kind, samples: fragment_seconds(profile, kind, samples),
        help=lambda samples: help_seconds(profile, trainer, samples),
        score=lambda _: 0.0,
        train=lambda _: group,
        commit=shape.updates * variant.optimizer_seconds + variant.publish_seconds,
        adopt=variant.adopt_seconds,
        steps=shape.steps,
        switch=2 * variant.switch_seconds,
        noise=profile.rollout.noise_cv if noise else 0.0,
    )


def helpers(profile: Profile, trainer: Devices) -> int:
    """Training devices that can generate."""
    return sum(count for kind, count in trainer.items() if speed(profile, kind, "rollout"))


def help_seconds(profile: Profile, trainer: Devices, samples: int) -> float:
    """Of a fragment on one of the trainer's devices; on unequal ones, at their mean speed."""
    rates = [
        count / fragment_seconds(profile, kind, samples)
        for kind, count in trainer.items()
        if count
    ]
    return helpers(profile, trainer) / sum(rates) if sum(rates) else float("inf")


def _check_pool(profile: Profile, role: Role, devices: Devices) -> None:
    if not sum(devices.values()):
        raise UserError(f"no device for the {role}; every schedule here needs at least one")
    for kind, count in devices.items():
        reason = fits(profile, kind, role)
        if count and reason is not None:
            raise UserError(reason)


def _cluster(
    profile: Profile,
    rollout: Devices,
    trainer: Devices,
    schedule: ScheduleChoice,
    batches: int,
    seed: int | None,
    look_ahead: LookAhead | None,
) -> Cluster:
    shape, hop = profile.shape, profile.rollout.handoff_seconds
    timing = timing_of(profile, trainer, tsp=schedule.tsp, noise=seed is not None)
    slots = helpers(profile, trainer) if schedule.may_help else 0
    plan = steady_plan(
        groups=shape.groups,
        group_size=shape.group_size,
        batches=schedule.warm_up + batches + 1,  # the last one measured is followed by another
        schedule=schedule,
    )
    cluster = build(
        plan, timing, rollout=rollout, trainer_slots=slots, seed=seed or 0, delay=lambda: hop,
        first_state=State(recovering=True, tag=Tag(controller=controller_of(schedule))),
        look_ahead=look_ahead,
    )  # fmt: skip
    size = full_size(plan, sum(rollout.values()) + slots)

    def each(seconds: float, samples: int = 1) -> Estimate:
        return Estimate(value=seconds / samples)

    prime(cluster, Costs(
        rollout={kind: each(timing.fragment(kind, size), size) for kind in rollout},
        help=each(timing.help(size), size) if slots else Estimate(),
        train=each(timing.train(shape.group_size)),
        switch=each(timing.switch),
        ready=each(hop),
        commit=each(timing.commit),
    ))  # fmt: skip
    return cluster


@dataclass(slots=True)
class _Watch:
    """Looks at the cluster between its actions."""

    cluster: Cluster
    warm_up: int
    batches: int
    causes: bool
    since: float = 0.0
    before: Mapping[tuple[str, Use], float] | None = None
    """Busy seconds up to the first measured batch."""
    meter: Meter = field(default_factory=Meter)
    _uses: dict[str, Cause] = field(default_factory=dict)
    _state: State | None = None

    def is_done(self) -> bool:
        commits = len(self.cluster.history.commit_times)
        if self.before is None and commits >= self.warm_up:
            self.since = self.meter.since = self.cluster.world.now
            self.before = dict(self.cluster.history.busy)
        if self.causes and self.before is not None:
            self._look()
        return commits >= self.warm_up + self.batches

    def _look(self) -> None:
        """At what each device does from here to the next action."""
        self.meter.advance(self.cluster.world.now, self._uses)
        state = self.cluster.scheduler.state
        if state is not self._state:
            self._state, self._uses = state, uses(self.cluster.plan, state)

    def busy(self) -> dict[tuple[str, Use], float]:
        """Since the warm-up."""
        before = self.before or {}
        return {key: s - before.get(key, 0.0) for key, s in self.cluster.history.busy.items()}


def _is_trainer(name: str) -> bool:
    return name.startswith("trainer")


def _busy_rollout(watch: _Watch, device_seconds: float) -> dict[Use, float]:
    shares: Counter[Use] = Counter()
    for (name, use), seconds in watch.busy().items():
        if not _is_trainer(name):
            shares[use] += seconds / device_seconds
    return dict(shares)


def _busy_trainer(
    watch: _Watch, window: float, profile: Profile, trainer: Devices, timing: Timing
) -> dict[Use, float]:
    """Its devices train together; what uneven shares leave of them is no use."""
    fluid = timing_of(profile, trainer).train(0) / timing.train(0)
    part = {"generate": 1 / sum(trainer.values()), "train": fluid}
    return {
        use: seconds * part.get(use, 1.0) / window
        for (name, use), seconds in watch.busy().items()
        if _is_trainer(name)
    }


def _bubbles(
    watch: _Watch, window: float, busy: Mapping[str, Mapping[Use, float]], num_rollout: int
) -> dict[str, dict[Bubble, float]]:
    shares: dict[str, Counter[Bubble]] = {"rollout": Counter(), "trainer": Counter()}
    for name, spent in watch.meter.devices.items():
        pool, number = ("trainer", 1) if _is_trainer(name) else ("rollout", num_rollout)
        if name != "reward":
            for cause, seconds in spent.items():
                shares[pool][cause] += 0.0 if cause in BUSY else seconds / window / number
    for pool, causes in shares.items():
        causes["remainder"] = max(0.0, 1 - sum(busy[pool].values()) - sum(causes.values()))
    return {pool: {c: s for c, s in causes.items() if s > 0} for pool, causes in shares.items()}


def _tag_batches(cluster: Cluster) -> tuple[TagBatch, ...]:
    helped = {
        commit.policy.version - 1: sum(
            fragment.fragment.num_samples
            for group in commit.trained
            for fragment in group.fragments
            if _is_trainer(fragment.generated_by)
        )
        for commit in cluster.commits.versions[1:]
    }
    return tuple(
        TagBatch(
            batch=record.batch,
            groups=record.decision.groups,
            reason=record.decision.reason,
            samples=helped[record.batch],
        )
        for record in cluster.scheduler.state.tag.history
        if record.batch in helped
    )


def _staleness(groups: list[TrainGroup]) -> dict[int, float]:
    counts = Counter(group.batch - group.policy.version for group in groups)
    return {value: counts[value] / len(groups) for value in sorted(counts)}


def _discarded(cluster: Cluster) -> float:
    """Of batches that are committed."""
    committed = len(cluster.commits.versions) - 1
    generated = sum(
        message.fragment.num_samples
        for message in cluster.broker.stored.get(subjects.TRAJ.name, [])
        if isinstance(message, FragmentGenerated) and message.fragment.batch < committed
    )
    trained = committed * cluster.plan.num_groups * cluster.plan.group_size
    return generated / trained - 1


def _together(rollout: Devices, trainer: Devices) -> Devices:
    return {
        kind: rollout.get(kind, 0) + trainer.get(kind, 0) for kind in sorted({*rollout, *trainer})
    }
