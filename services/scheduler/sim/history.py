"""History of the simulated cluster: busy seconds of its devices, for the planner."""

from dataclasses import dataclass, field
from typing import Literal

from services.scheduler.costs.noise import Noise
from services.scheduler.sim.world import World

SimUse = Literal["generate", "train", "commit", "load", "exchange"]


@dataclass(slots=True)
class History:
    world: World
    noise: Noise = field(default_factory=Noise)
    busy: dict[tuple[str, SimUse], float] = field(default_factory=dict)
    """(device, use) -> seconds."""
    commit_times: list[float] = field(default_factory=list)
    beyond_mean: dict[str, float] = field(default_factory=dict)
    """Device -> seconds that noise has added to its work so far, or taken from it."""

    def drawn(self, device: str, seconds: float) -> float:
        """Duration of the device's next work, from its mean."""
        if not seconds:
            return 0.0
        drawn = seconds * self.noise.factor(device)
        self.beyond_mean[device] = self.beyond_mean.get(device, 0.0) + drawn - seconds
        return drawn

    def works(self, device: str, use: SimUse, load: float, seconds: float) -> None:
        """Record a use that begins now, after a version is loaded."""
        self.use(device, "load", 0.0, load)
        self.use(device, use, load, seconds)

    def worked(self, device: str, use: SimUse, begin: float) -> None:
        """Record a use that ends now."""
        seconds = self.world.now - begin
        self.use(device, use, -seconds, seconds)

    def committed(self) -> None:
        self.commit_times.append(self.world.now)

    def use(self, device: str, use: SimUse, delay: float, seconds: float) -> None:
        """Record a use that begins after ``delay``, or began before now if that is negative."""
        if seconds:
            self.busy[device, use] = self.busy.get((device, use), 0.0) + seconds
