"""HTTP views of a run's throughput, and of where work waits."""

from typing import Any

from services.scheduler.core.waiting import QueueName
from services.scheduler.shell.api_models import View, example

EXAMPLE_QUEUE: dict[str, Any] = {
    "queue": "scoring", "samples": 24, "oldest_seconds": 41.5, "usual_seconds": 3.1, "late": True,
    "worker": None,
}  # fmt: skip
EXAMPLE_SLOWEST_WORKER = {
    "worker": "rollout-3",
    "seconds_per_sample": 0.9,
    "mean_seconds_per_sample": 0.45,
}


class QueueView(View):
    """Samples that wait for the same thing."""

    model_config = example(**EXAMPLE_QUEUE)

    queue: QueueName
    """generation: no device has them yet. in_hand: a device has them, and generates them or others
    first. scoring: generated, and without rewards. training: of whole groups that are in no
    gradient yet."""
    samples: int
    """How many there are."""
    oldest_seconds: float | None
    """How long the oldest has waited, of what devices have in hand the one that is furthest beyond
    its usual time; null if nothing waits, or that is not known."""
    usual_seconds: float | None
    """How long that one should take, by learned costs; null if they are not known."""
    late: bool
    """Whether it has waited more than three times as long, and five seconds. generation: devices
    are missing or hang. in_hand: `worker` hangs, or is far slower than it was. scoring: reward
    workers are too few, or hang. training: the trainer does."""
    worker: str | None
    """The worker that has it; null if no single one has."""


class SlowestView(View):
    """The worker that takes longest for a sample."""

    model_config = example(**EXAMPLE_SLOWEST_WORKER)

    worker: str
    """Name of the worker."""
    seconds_per_sample: float
    """Measured seconds per generated sample."""
    mean_seconds_per_sample: float
    """Mean over all that generate. Where the slowest takes twice as long, look at its host; unlike
    devices differ by nature."""


class LoadView(View):
    """Throughput of a run, compared with the capacity of its devices, and where work waits."""

    model_config = example(
        samples_per_second=10.4, forecast_samples_per_second=12.1, bound_samples_per_second=13.0,
        queues=[EXAMPLE_QUEUE], slowest=EXAMPLE_SLOWEST_WORKER,
    )  # fmt: skip

    samples_per_second: float | None
    """Trained samples per second, by the median of the newest steps; null before the second."""
    forecast_samples_per_second: float | None
    """Throughput that the schedule's own model forecasts for the live devices, with learned costs.
    A run far below it is delayed by something that no schedule changes: rewards, transfer of
    weights, restarts, a slow worker. Null until costs are learned."""
    bound_samples_per_second: float | None
    """Upper bound on these devices: all work is done and no device is idle. A forecast far below it
    means that the split of devices, TAG or staleness leave some devices idle: see the plan."""
    queues: list[QueueView]
    """In the order in which a sample goes through them; empty once the run is over."""
    slowest: SlowestView | None
    """The worker that takes longest for a sample; null where fewer than two generate."""
