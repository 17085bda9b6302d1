"""Results of a simulated run: seconds per batch, and use of devices."""

from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from services.scheduler.core.device_queues import sample_seconds
from services.scheduler.costs.profile import Role
from services.scheduler.sim.cluster import Cluster
from services.scheduler.sim.history_events import SimUse
from services.scheduler.sim.sites import SiteUse
from shared.messages import subjects
from shared.messages.contracts import FragmentGenerated, TrainGroup


@dataclass(frozen=True, slots=True, kw_only=True)
class TagBatch:
    """TAG's decision for a batch, and its effect."""

    batch: int
    groups: int
    """Most groups that the trainer may generate."""
    reason: str
    groups_generated: float
    """Groups that the trainer generated in the end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationResult:
    step_seconds: float
    """Per batch, mean over the measured ones. The noise of the devices' work is removed: few pieces
    of work do not average out, and a step below the bound would be luck. Waits for one another
    caused by the noise remain."""
    balanced_seconds: float
    """Per batch, of all measured batches, with what generation has gained or lost on training."""
    floor_seconds: float
    busy: Mapping[Role, Mapping[SimUse, float]]
    """Pool -> use -> share of its device-seconds."""
    tag: tuple[TagBatch, ...]
    """TAG's decisions for the measured batches."""
    staleness: Mapping[int, float]
    """Steps -> share of the trained groups."""
    discarded: float
    """Samples that were generated and not trained, over those that were trained."""
    sites: Mapping[str, SiteUse]
    """Name of a far site -> its work per batch."""
    declines: Mapping[str, str]
    """The same -> work that one of its devices does not get in the end, and why."""

    @property
    def utilisation(self) -> float:
        """Bound over time: 1 if no device ever waited and nothing but work took time."""
        return self.floor_seconds / self.step_seconds


@dataclass(frozen=True, slots=True)
class CommitMark:
    """The cluster at a commit."""

    time: float
    generated: float
    """Samples, those under way in proportion."""
    busy: Mapping[tuple[str, SimUse], float]
    """(device, use) -> seconds."""
    sites: Mapping[str, SiteUse]
    beyond_mean: float = 0.0
    """Seconds that noise has added to a device's work until then, on average over devices."""


@dataclass(slots=True)
class ClusterWatch:
    """Observes the cluster between its actions, until enough batches are committed."""

    cluster: Cluster
    batches: int
    marks: list[CommitMark] = field(default_factory=list)
    """Measurements at the beginning and at every commit."""

    def is_done(self) -> bool:
        commits = len(self.cluster.history.commit_times)
        if len(self.marks) <= commits:
            self.marks.append(self._mark())
        return commits >= self.batches

    def _mark(self) -> CommitMark:
        cluster = self.cluster
        generated = sum(message.fragment.num_samples for message in _generated(cluster))
        return CommitMark(
            time=cluster.world.now,
            generated=generated + _under_way(cluster),
            busy=dict(cluster.history.busy),
            sites={name: site.use for name, site in cluster.sites.items()},
            beyond_mean=_mean(cluster.history.beyond_mean.values()),
        )


@dataclass(frozen=True, slots=True)
class Window:
    """Delimits what is measured: from one commit to another."""

    first: int
    last: int
    begin: CommitMark
    end: CommitMark

    @property
    def seconds(self) -> float:
        return self.end.time - self.begin.time

    @property
    def luck(self) -> float:
        """Seconds per batch that noise has added to a device's work, on average."""
        return (self.end.beyond_mean - self.begin.beyond_mean) / (self.last - self.first)

    def site_use(self, name: str) -> SiteUse:
        """Return the work of a site per batch."""
        both = zip(self.begin.sites[name], self.end.sites[name], strict=True)
        return SiteUse(*((after - before) / (self.last - self.first) for before, after in both))

    def from_stock(self, batch_samples: int) -> float:
        """Batches that were trained and not generated in it, per batch."""
        generated = self.end.generated - self.begin.generated
        return 1 - generated / batch_samples / (self.last - self.first)

    def busy(self) -> dict[tuple[str, SimUse], float]:
        return {key: s - self.begin.busy.get(key, 0.0) for key, s in self.end.busy.items()}


def measure(
    watch: ClusterWatch, warm_up: int, generation_seconds: float, floor_seconds: float
) -> SimulationResult:
    """Measures the batches after the warm-up. ``generation_seconds``: in which all devices that may
    generate generate a batch."""
    cluster = watch.cluster
    batch_samples = cluster.plan.num_groups * cluster.plan.group_size
    window = _steady(watch.marks, warm_up, batch_samples)
    commits = cluster.commits[window.first + 1 : window.last + 1]
    busy: dict[Role, dict[SimUse, float]] = {
        "rollout": _busy_rollout(window, len(cluster.rollout)),
        "trainer": _busy_trainer(window, len(cluster.members)),
    }
    whole = Window(warm_up, len(watch.marks) - 1, watch.marks[warm_up], watch.marks[-1])
    stock = whole.from_stock(batch_samples) if cluster.plan.schedule.staleness_limit else 0.0
    return SimulationResult(
        step_seconds=_step_seconds(window, batch_samples, generation_seconds) - window.luck,
        balanced_seconds=balanced(
            whole.seconds / (whole.last - whole.first),
            stock,
            generation_seconds,
            busy=sum(_busy_rollout(whole, len(cluster.rollout)).values())
            if cluster.rollout
            else 1.0,
        ),
        floor_seconds=floor_seconds,
        busy=busy,
        tag=_tag_batches(cluster, window),
        staleness=_staleness([group for commit in commits for group in commit.trained]),
        discarded=_discarded(cluster, batch_samples),
        sites={name: whole.site_use(name) for name in cluster.sites},
        declines={name: _declines(cluster, name) for name in cluster.sites},
    )


def balanced(seconds: float, from_stock: float, generation_seconds: float, *, busy: float) -> float:
    """Per batch, of some batches in which generation was ahead by more or less in the end.

    A batch that was taken from stock has to be generated some time, by all devices at best. One
    that was added to it will not have to be: it is worth what devices would not have idled anyway.

    Args:
        from_stock: batches taken from stock, per batch; negative if they were added.
        generation_seconds: of a batch, by all devices that may generate.
        busy: share of their time that rollout devices worked.
    """
    worth = generation_seconds if from_stock > 0 else generation_seconds * min(1.0, busy)
    return seconds + from_stock * worth


def _steady(marks: Sequence[CommitMark], warm_up: int, batch_samples: int) -> Window:
    """The longest window in which as much was generated as was trained, or nearly.

    With one-step asynchrony generation is ahead by something that changes from batch to batch,
    often in a cycle of two: the trainer helps in one batch and finds nothing to do in the next.
    """
    last = len(marks) - 1
    shortest = max(1, (last - warm_up) // 2)
    windows = [
        Window(first, end, marks[first], marks[end])
        for first in range(warm_up, last)
        for end in range(first + shortest, last + 1)
    ]

    def order(window: Window) -> tuple[float, int]:
        return abs(round(window.from_stock(batch_samples), 3)), window.first - window.last

    return min(windows, key=order)


def _step_seconds(window: Window, batch_samples: int, generation_seconds: float) -> float:
    """Samples taken from stock have to be generated at some time: by all devices, at best."""
    samples = max(0.0, window.from_stock(batch_samples))
    return window.seconds / (window.last - window.first) + samples * generation_seconds


def _mean(values: Collection[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def _generated(cluster: Cluster) -> list[FragmentGenerated]:
    stored = cluster.broker.stored.get(subjects.TRAJ.name, [])
    return [message for message in stored if isinstance(message, FragmentGenerated)]


def _under_way(cluster: Cluster) -> float:
    """Samples that rollout devices have in work, each fragment as far as it should be."""
    state, now, samples = cluster.scheduler.state, cluster.world.now, 0.0
    for worker in state.rollout:
        for assigned in worker.assigned[: worker.concurrency]:
            needed = state.costs.whole_samples(assigned.num_samples) * sample_seconds(state, worker)
            done = (now - assigned.since) / needed
            samples += assigned.num_samples * min(1.0, done)
    return samples


def _is_trainer(name: str) -> bool:
    return name.startswith("trainer")


def _busy_rollout(window: Window, num_devices: int) -> dict[SimUse, float]:
    """A fragment counts wholly from its beginning, so a window may hold a little too much."""
    shares: defaultdict[SimUse, float] = defaultdict(float)
    for (name, use), seconds in window.busy().items():
        if not _is_trainer(name):
            shares[use] += seconds / window.seconds / num_devices
    shares["generate"] = min(shares["generate"], 1 - shares["load"])
    return dict(shares)


def _busy_trainer(window: Window, num_devices: int) -> dict[SimUse, float]:
    shares: defaultdict[SimUse, float] = defaultdict(float)
    for (name, use), seconds in window.busy().items():
        if _is_trainer(name):
            shares[use] += seconds / window.seconds / num_devices
    return dict(shares)


def _tag_batches(cluster: Cluster, window: Window) -> tuple[TagBatch, ...]:
    decisions = {each.batch: each.decision for each in cluster.scheduler.state.tag.history}
    batches = []
    for commit in cluster.commits[window.first + 1 : window.last + 1]:
        decision = decisions.get(commit.policy.version - 1)
        if decision is not None:
            helped = _num_helped(commit.trained) / cluster.plan.group_size
            batches.append(
                TagBatch(
                    batch=commit.policy.version - 1,
                    groups=decision.groups,
                    reason=decision.reason,
                    groups_generated=helped,
                )
            )
    return tuple(batches)


def _num_helped(groups: Sequence[TrainGroup]) -> int:
    """Samples that the trainer generated."""
    fragments = [fragment for group in groups for fragment in group.fragments]
    return sum(f.fragment.num_samples for f in fragments if _is_trainer(f.generated_by))


def _declines(cluster: Cluster, name: str) -> str:
    state, site = cluster.scheduler.state, cluster.sites[name]
    workers = (state.workers[each.address] for each in cluster.devices if each.site is site)
    return next((each.declines for each in workers if each.declines), "")


def _staleness(groups: Sequence[TrainGroup]) -> dict[int, float]:
    counts = Counter(group.batch - group.policy.version for group in groups)
    return {value: counts[value] / len(groups) for value in sorted(counts)}


def _discarded(cluster: Cluster, batch_samples: int) -> float:
    """Return samples that were generated and not trained, over the samples of all committed
    batches."""
    committed = len(cluster.commits) - 1
    fragments = [message.fragment for message in _generated(cluster)]
    generated = sum(f.num_samples for f in fragments if f.batch < committed)
    return generated / (committed * batch_samples) - 1
