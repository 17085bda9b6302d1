"""Finds where work waits: how much stands in each queue, and how long the oldest has stood there.

generation   samples that no device has yet         scoring    generated, and without a reward
in_hand      at a device, in work or behind that    training   whole groups that are not trained
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from services.scheduler.core.device_queues import sample_seconds
from services.scheduler.core.state import BatchState, GroupState, Plan, State, WorkerState
from services.scheduler.core.throughput import BatchForecast
from services.scheduler.core.unissued import num_unissued

QueueName = Literal["generation", "in_hand", "scoring", "training"]
LATE_FACTOR = 3.0
"""Times its usual wait after which the oldest in a queue is late."""
MIN_LATE_S = 5.0
"""Minimum seconds beyond the usual wait: shorter delays do not matter."""


@dataclass(frozen=True, slots=True)
class WaitingSamples:
    """Samples that wait for the same thing."""

    name: QueueName
    samples: int = 0
    oldest_seconds: float | None = None
    """Seconds for which the oldest has waited; None if none waits, or that is not known."""
    usual_seconds: float | None = None
    """Seconds that it should wait, by learned costs; None if they are unknown."""
    worker: str = ""
    """Worker that has the oldest; empty if no single one has."""

    @property
    def is_late(self) -> bool:
        """Whether the oldest has waited far longer than it should."""
        if self.oldest_seconds is None or self.usual_seconds is None:
            return False
        most = max(LATE_FACTOR * self.usual_seconds, self.usual_seconds + MIN_LATE_S)
        return self.oldest_seconds > most


def queues(plan: Plan, state: State, now: float, forecast: BatchForecast) -> list[WaitingSamples]:
    """Return the queues in the order in which a sample goes through them."""
    return [
        _to_generate(plan, state, now, forecast),
        _in_hand(state, now),
        _to_score(state, now),
        _to_train(plan, state, now),
    ]


def _to_generate(plan: Plan, state: State, now: float, forecast: BatchForecast) -> WaitingSamples:
    samples, batch = num_unissued(plan, state), state.batch
    if not samples or batch is None:
        return WaitingSamples("generation")
    opened = batch.opened_at
    return WaitingSamples("generation", samples, _age(now, opened), forecast.forecast_seconds)


def _in_hand(state: State, now: float) -> WaitingSamples:
    """Return what devices have; the oldest is the one that is furthest beyond what it takes."""
    samples, oldest, beyond = 0, WaitingSamples("in_hand"), float("-inf")
    for worker in state.workers.values():
        samples += sum(assigned.num_samples for assigned in worker.assigned)
        for assigned in worker.assigned[: worker.concurrency]:
            usual = _usual(state, worker, assigned.num_samples)
            age = _age(now, assigned.since)
            if age - (usual or 0.0) > beyond:
                beyond = age - (usual or 0.0)
                oldest = WaitingSamples("in_hand", 0, age, usual, worker.name)
    if not samples:
        return WaitingSamples("in_hand")
    return WaitingSamples(
        "in_hand", samples, oldest.oldest_seconds, oldest.usual_seconds, oldest.worker
    )


def _usual(state: State, worker: WorkerState, samples: int) -> float | None:
    costs = state.costs
    if not costs.rollout:
        return None
    return costs.whole_samples(samples) * sample_seconds(state, worker)


def _to_score(state: State, now: float) -> WaitingSamples:
    waiting = [
        each
        for batch in state.batches if batch.count("generated")
        for group in batch.groups
        for each in group.fragments if each.stage == "generated"
    ]  # fmt: skip
    if not waiting:
        return WaitingSamples("scoring")
    oldest = _age(now, min(each.generated_at for each in waiting))
    return WaitingSamples(
        "scoring", sum(each.num_samples for each in waiting), oldest, state.costs.ready.value
    )


def _to_train(plan: Plan, state: State, now: float) -> WaitingSamples:
    batch = state.batch
    waiting = [] if batch is None else list(_untrained(state, batch))
    if not waiting:
        return WaitingSamples("training")
    # Of a fragment whose rewards were heard of first, nobody knows when it was generated.
    since = [max(each.generated_at for each in group.fragments) for group in waiting]
    times = [at for at in since if at]
    each = state.costs.train_seconds([member.address for member in state.members])
    usual = None if each is None else each * len(waiting) + state.costs.ready.seconds
    oldest = _age(now, min(times)) if times else None
    return WaitingSamples("training", len(waiting) * plan.group_size, oldest, usual)


def _untrained(state: State, batch: BatchState) -> Iterator[GroupState]:
    """Yield the groups that are whole and in no gradient yet."""
    done = frozenset[int]() if state.fluid is None else state.fluid.trained
    for index, group in enumerate(batch.groups):
        if group.sent and index not in done:
            yield group


def _age(now: float, since: float) -> float:
    return max(0.0, now - since)


def is_exchange_late(state: State, now: float) -> bool:
    """Whether members have exchanged sums for far longer than a batch usually takes from there to
    its commit: some of them wait for a sum that is lost."""
    exchange = None if state.fluid is None or state.fluid.step else state.fluid.exchange
    return exchange is not None and now - exchange.since > LATE_FACTOR * state.costs.commit.seconds


def standstill(plan: Plan, state: State, seconds: float) -> str:
    """Return what the open batch waits for although no device works."""
    batch, fluid = state.batch, state.fluid
    assert batch is not None
    waits = [
        ("fragments that no device is given", batch.count("pending")),
        ("fragments that devices were given and do not generate", batch.count("issued")),
        ("fragments without a reward", batch.count("generated")),
        ("groups that are not trained", sum(1 for _ in _untrained(state, batch))),
    ]
    lines = [f"{what}: {number}" for what, number in waits if number]
    if fluid is not None:
        lines.append(f"attempt {fluid.num_given_up}, update {fluid.update + 1} of {plan.updates}")
        if fluid.num_given:
            lines.append(f"pieces that members do not report: {fluid.num_given}")
        elif fluid.step is not None:
            lines.append(f"the step of {fluid.step.committer}")
        elif fluid.exchange is not None:
            lines.append(f"the sums of {', '.join(sorted(fluid.exchange.silent))}")
    return (
        f"no device has worked for {seconds:.0f} s, and batch {batch.index} is open. It waits for "
        f"{'; '.join(lines)}. A restart of the workers gives out the work again"
    )
