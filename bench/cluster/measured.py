"""What the runs of one schedule show: seconds per batch, and what devices did meanwhile.

As in `services.scheduler.sim.measured`: with one-step asynchrony generation is ahead by something
that changes from batch to batch, so that what was taken from stock, or added to it, counts.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from bench.cluster.session import EmulatedRun
from bench.runner.figures import Window, samples_between
from bench.simulation.figures import balanced
from services.scheduler.costs.profile import Role
from services.scheduler.costs.seconds import fragment_seconds

ROLES: tuple[Role, ...] = ("rollout", "trainer")


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredRun:
    """Figures of one run. Seconds are those of the emulation: multiply by the scale."""

    seed: int
    """Seed of the service times."""
    warm_up: int
    """Batches."""
    step_seconds: float
    """Mean from commit to commit."""
    balanced_seconds: float
    """The same with what generation has gained or lost on training, as the simulator counts it."""
    batch_seconds: list[float]
    """Seconds of each measured batch, from commit to commit."""
    from_stock: float
    shares: dict[str, dict[str, float]]
    """Pool -> use -> share of its device-seconds."""
    waits: dict[str, dict[str, float]]
    """Pool -> cause, as the scheduler sees it -> share of its device-seconds."""
    messages: dict[str, float]
    """Stream -> messages stored per batch."""
    cpu: dict[str, float]
    """Process -> cores that it kept busy."""
    overshoot_ms: float
    """Median over the sleeps of all emulated devices' processes, at most."""


def measure(run: EmulatedRun, warm_up: int, last: int) -> MeasuredRun:
    """Measures the batches from the version ``warm_up`` to the version ``last``."""
    setting, window = run.setting, Window(run, warm_up, last)
    stock = _from_stock(run, window) if setting.schedule.staleness_limit else 0.0
    step = (window.end - window.begin) / window.num_batches
    shares: dict[str, dict[str, float]] = {role: _shares(run, role, window) for role in ROLES}
    stored = run.begin.stored
    return MeasuredRun(
        seed=setting.seed,
        warm_up=warm_up,
        step_seconds=step,
        balanced_seconds=balanced(
            step,
            stock,
            _generation_seconds(run) / setting.scale,
            busy=1 - shares["rollout"].get("idle", 0.0),
        ),
        batch_seconds=window.batch_seconds,
        from_stock=stock,
        shares=shares,
        waits={role: window.waits(role) for role in ROLES},
        messages={
            stream: (number - stored[stream]) / (run.end.version - run.begin.version)
            for stream, number in run.end.stored.items()
        },
        cpu={name: used for name, used in run.cores.items() if name != "bench"},
        overshoot_ms=max(one["median_ms"] for one in run.overshoot.values()),
    )


def _from_stock(run: EmulatedRun, window: Window) -> float:
    """Returns the batches that were trained and not generated in the window, per batch."""
    generated = samples_between(run.intervals, window.begin, window.end)
    batch = run.setting.load_profile().shape.samples
    return 1 - generated / batch / window.num_batches


def _shares(run: EmulatedRun, role: Role, window: Window) -> dict[str, float]:
    number = run.setting.num_rollout if role == "rollout" else run.setting.num_trainer
    if not number:
        return {}
    shares = window.shares(role, number)
    return dict(shares) | {"idle": 1 - sum(shares.values())}


def _generation_seconds(run: EmulatedRun) -> float:
    """Returns how long all devices that may generate take for a batch, at full scale."""
    setting, profile = run.setting, run.setting.load_profile()
    size = setting.schedule.fixed_fragment or profile.shape.group_size
    pools: list[Mapping[str, int]] = [
        setting.rollout,
        *([setting.trainer] if setting.schedule.trainer_generates else []),
    ]
    rate = sum(
        n / fragment_seconds(profile, kind, size) for pool in pools for kind, n in pool.items()
    )
    return profile.shape.samples / size / rate
