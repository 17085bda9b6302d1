"""Results of a simulated run: seconds per batch, groups that the trainer generated, sites."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from services.scheduler.core.device_queues import sample_seconds
from services.scheduler.sim.cluster import Cluster
from services.scheduler.sim.history import SimUse
from services.scheduler.sim.sites import SiteUse
from shared.messages import subjects
from shared.messages.contracts import FragmentGenerated, TrainGroup


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationResult:
    step_seconds: float
    """Per batch, mean over the measured ones. The noise of the devices' work is removed: few pieces
    of work do not average out, and a step below the bound would be luck. Waits for one another
    caused by the noise remain."""
    floor_seconds: float
    helped_groups: float
    """Groups that the trainer generated, mean over the batches for which TAG decided."""
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
        generated = sum(message.fragment.num_samples for message in generated_fragments(cluster))
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


def measure(
    watch: ClusterWatch, warm_up: int, generation_seconds: float, floor_seconds: float
) -> SimulationResult:
    """Measures the batches after the warm-up. ``generation_seconds``: in which all devices that may
    generate generate a batch."""
    cluster = watch.cluster
    batch_samples = cluster.plan.num_groups * cluster.plan.group_size
    window = steady_window(watch.marks, warm_up, batch_samples)
    whole = Window(warm_up, len(watch.marks) - 1, watch.marks[warm_up], watch.marks[-1])
    return SimulationResult(
        step_seconds=_step_seconds(window, batch_samples, generation_seconds) - window.luck,
        floor_seconds=floor_seconds,
        helped_groups=_helped_groups(cluster, window),
        sites={name: whole.site_use(name) for name in cluster.sites},
        declines={name: _declines(cluster, name) for name in cluster.sites},
    )


def steady_window(marks: Sequence[CommitMark], warm_up: int, batch_samples: int) -> Window:
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


def generated_fragments(cluster: Cluster) -> list[FragmentGenerated]:
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


def _helped_groups(cluster: Cluster, window: Window) -> float:
    decided = {each.batch for each in cluster.scheduler.state.tag.history}
    helped = [
        num_helped(commit.trained) / cluster.plan.group_size
        for commit in cluster.commits[window.first + 1 : window.last + 1]
        if commit.policy.version - 1 in decided
    ]
    return _mean(helped)


def num_helped(groups: Sequence[TrainGroup]) -> int:
    """Return the number of samples that the trainer generated."""
    fragments = [fragment for group in groups for fragment in group.fragments]
    return sum(f.fragment.num_samples for f in fragments if is_trainer(f.generated_by))


def is_trainer(name: str) -> bool:
    return name.startswith("trainer")


def _declines(cluster: Cluster, name: str) -> str:
    state, site = cluster.scheduler.state, cluster.sites[name]
    workers = (state.workers[each.address] for each in cluster.devices if each.site is site)
    return next((each.declines for each in workers if each.declines), "")
