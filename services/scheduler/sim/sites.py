"""Sites of the simulated cluster: the devices of a site share its line, in each direction."""

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

from services.scheduler.core.fluid.events import LinkMeasured, VersionLoaded
from services.scheduler.core.fluid.levels import BYTES_SHARE
from services.scheduler.sim.broker import Broker
from services.scheduler.sim.history import History
from services.scheduler.sim.timing import Timing
from services.scheduler.sim.world import Action, World
from shared.messages.contracts import FragmentGenerated, GenerateFragment, ObjectRef, Trajectories
from shared.messages.records import Level

REF = ObjectRef(key="sim/object", sha256="0" * 64, size=1)
MAX_PENDING_RESULTS = 4
"""Results of a device with which it waits: two are being stored, one is decoded, one generated."""
MIN_BYTES = 1.0
"""A transfer with fewer bytes left is done: rounding leaves them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """Devices of one kind behind one line to the home site, where trainers and store are."""

    name: str
    kind: str
    count: int
    up: float
    """Bytes per second from the site."""
    down: float
    """Bytes per second to it."""
    delay: float = 0.0
    """Seconds of a message one way."""
    trains: bool = False
    """Whether its devices are members; if not, they only generate."""


@dataclass(slots=True, eq=False)
class Transfer:
    left: float
    """Bytes that are still to be sent."""
    done: Action


@dataclass(slots=True)
class Line:
    """One direction of a line: concurrent transfers have equal shares of its rate."""

    world: World
    rate: float
    delay: float
    num_bytes: float = 0.0
    """Bytes that had crossed at the last `settle`."""
    _open: list[Transfer] = field(default_factory=list)
    _since: float = 0.0
    _turn: int = 0
    """Number of changes to the open transfers, by which an outdated end is recognised."""

    def send(self, size: float, done: Action) -> Transfer:
        """Begin a transfer of this many bytes; ``done`` follows when they have arrived."""
        self.settle()
        self._open.append(transfer := Transfer(size, done))
        self._await_end()
        return transfer

    def stop(self, transfer: Transfer) -> None:
        """Give up a transfer."""
        self.settle()
        self._open = [each for each in self._open if each is not transfer]
        self._await_end()

    def settle(self) -> None:
        """Count what has crossed until now."""
        sent = (self.world.now - self._since) * self.rate if self._open else 0.0
        self._since, self.num_bytes = self.world.now, self.num_bytes + sent
        for each in self._open:
            each.left -= sent / len(self._open)

    def _await_end(self) -> None:
        self._turn += 1
        turn = self._turn

        def end() -> None:
            if turn == self._turn:
                self.settle()
                over = [each for each in self._open if each.left <= MIN_BYTES]
                self._open = [each for each in self._open if each.left > MIN_BYTES]
                self._await_end()
                for each in over:
                    self.world.after(self.delay, each.done)

        if self._open:
            least = min(each.left for each in self._open)
            self.world.after(max(0.0, least) * len(self._open) / self.rate, end)


class SiteUse(NamedTuple):
    """Work of a site: in all, or per batch."""

    up: float
    """Bytes that have left it."""
    down: float
    samples: float
    """Samples that it has generated."""
    sums: float
    """Sums of gradients that it has given."""


@dataclass(slots=True, eq=False)
class SimSite:
    """A site with its line; ``handle`` gives the scheduler what was measured."""

    site: Site
    world: World
    handle: Callable[[LinkMeasured | VersionLoaded], None]
    level: Callable[[], Level] = lambda: "exact"
    """Returns how the newest version is rounded."""
    version: int = -1
    """Newest version that is at the site."""
    up: Line = field(init=False)
    down: Line = field(init=False)
    num_samples: int = 0
    num_sums: int = 0
    _fetch: tuple[int, Transfer] | None = None
    _waiting: dict[str, Action] = field(default_factory=dict)
    """Address of a device -> what it does when it has the version that is fetched."""

    def __post_init__(self) -> None:
        site = self.site
        self.up = Line(self.world, site.up, site.delay)
        self.down = Line(self.world, site.down, site.delay)

    @property
    def use(self) -> SiteUse:
        self.up.settle()
        self.down.settle()
        return SiteUse(self.up.num_bytes, self.down.num_bytes, self.num_samples, self.num_sums)

    def cross(self, line: Line, size: float, then: Mapping[str, Action]) -> Transfer:
        """Begin a transfer for devices, by address: each reports its seconds per byte, and acts."""
        began = self.world.now

        def arrived() -> None:
            each = (self.world.now - began) / size
            up, down = (each, None) if line is self.up else (None, each)
            for address, action in then.items():
                report = partial(self.handle, LinkMeasured(address, up, down))
                self.world.after(self.site.delay, report)
                action()

        return line.send(size, arrived)

    def fetch_weights(self, version: int, size: float, address: str, then: Action) -> None:
        """Fetch the weights of a version: of the next one only its change, if that is rounded."""
        share = BYTES_SHARE[self.level()] if version == self.version + 1 else 1.0
        self.fetch(version, share * size, address, then)

    def fetch(self, version: int, size: float, address: str, then: Action) -> None:
        """Fetch a version once for all devices that want it; the fetch of an older one ends."""
        if version <= self.version:
            then()
            return
        if self._fetch is None or self._fetch[0] < version:
            if self._fetch is not None:
                self.down.stop(self._fetch[1])
            self._waiting = {}
            self._fetch = version, self.cross(self.down, size, self._waiting)

        def arrived() -> None:
            self.version, self._fetch = version, None
            self.handle(VersionLoaded(address, version))
            then()

        self._waiting[address] = arrived


@dataclass(slots=True, kw_only=True)
class SimDevice(ABC):
    """A device that generates: its results are stored, over its site's line, and then reported."""

    world: World
    broker: Broker
    history: History
    timing: Timing
    name: str
    kind: str
    address: str
    site: SimSite | None = None
    """None: the home site."""
    newest: int = -1
    """Newest version that is published."""
    _tasks: deque[GenerateFragment] = field(default_factory=deque)
    _results: deque[FragmentGenerated] = field(default_factory=deque)

    @abstractmethod
    def _next(self) -> None:
        """Begin what may begin now."""

    @property
    def _is_full(self) -> bool:
        """Whether it waits until results are stored."""
        return len(self._results) >= MAX_PENDING_RESULTS

    def _store(self, task: GenerateFragment, seconds: float) -> None:
        """Store a fragment that was generated in this time."""
        digest, size = task.policy.weights_digest, self.timing.sample_bytes
        states = REF.model_copy(update={"size": size * task.fragment.num_samples})
        self._results.append(FragmentGenerated(
            fragment=task.fragment, policy=task.policy, prompt=task.prompt, worker=self.address,
            stored=Trajectories(
                trajectory=states, conditions=REF, media=REF, weights_digest=digest
            ),
            seconds=seconds,
        ))  # fmt: skip
        if self.site is None:
            self.broker.publish(self._results.popleft())
        elif len(self._results) == 1:
            self._send(self.site)

    def _send(self, site: SimSite) -> None:
        """Send the first result; the others follow."""

        def stored() -> None:
            site.num_samples += self._results[0].fragment.num_samples
            self.broker.publish(self._results.popleft())
            if self._results:
                self._send(site)
            self._next()

        size = self._results[0].stored.trajectory.size
        site.cross(site.up, size, {self.address: stored})
