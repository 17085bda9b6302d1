"""The emulated devices of one run, and the services over them: without torch, many per process."""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass

from bench.cluster.blobs import EmulatedWeights
from bench.cluster.generation import EmulatedDevice, EmulatedRollout
from bench.cluster.hold import Held, QueuedHeld
from bench.cluster.members import EmulatedMember, first_weights
from bench.cluster.payloads import Scaled, scaled, whole
from bench.cluster.setting import DEVICES_PER_NODE, Setting
from bench.cluster.stores import Line
from services.scheduler.costs import fluid
from services.scheduler.costs.noise import Noise, rollout_device
from services.scheduler.costs.profile import Profile, Role, device
from services.scheduler.sim.cluster import member_name
from shared.messages.workers import Device
from shared.run.layout import checkpoints_folder, weights_folder

GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class Emulation:
    """What devices of one run have in common."""

    setting: Setting
    profile: Profile
    sizes: Scaled

    @classmethod
    def of(cls, setting: Setting) -> "Emulation":
        profile = setting.load_profile()
        members = max(1, setting.num_member_hosts)
        if setting.all_bytes:
            return cls(setting, profile, whole(profile))
        sizes = scaled(profile, setting.scale, setting.num_nodes + members, members)
        return cls(setting, profile, sizes)

    def line(self) -> Line:
        """Returns a line on which an adapter takes the seconds to be stored, or to be fetched, that
        are half of its publication's."""
        seconds = fluid.weights_seconds(self.profile) / self.setting.scale
        return Line(seconds / self.sizes.adapter)

    def lines(self) -> dict[str, Line]:
        """Returns the lines on which whoever trains stores a version's parts, by their folders;
        none if all bytes are stored, which take their own time."""
        run, scale = self.setting.run, self.setting.scale
        if self.setting.all_bytes:
            return {}
        seconds = fluid.checkpoint_seconds(self.profile) / scale
        states = Line(seconds / self.sizes.checkpoint)
        return {weights_folder(run): self.line(), checkpoints_folder(run): states}

    def held(self, device: "Named") -> Held:
        noise = Noise(self.profile.rollout.noise_cv, self.setting.seed)
        kind = QueuedHeld if device.is_member else Held
        return kind(device.name, self.setting.scale, noise, device.drawn_as)

    def registered(self, kind: str, role: Role, *, concurrency: int) -> Device:
        """Returns the device as a worker on it registers."""
        needs = (self.profile.rollout if role == "rollout" else self.profile.variant).memory_gib
        if role == "rollout" and kind in self.profile.streaming:
            needs = self.profile.streaming[kind].memory_gib
        return Device(
            kind=kind,
            memory_bytes=int(device(self.profile, kind).memory_gib * GIB),
            needs_bytes=int(needs * GIB),
            concurrency=concurrency,
        )


def rollout_devices(emulation: Emulation) -> list[EmulatedRollout]:
    first = EmulatedWeights.first(emulation.setting.seed).digest
    return [
        EmulatedRollout(emulation.profile, each.kind, emulation.held(each), emulation.sizes, first)
        for each in named_rollout(emulation.setting.rollout)
    ]


@dataclass(frozen=True, slots=True)
class Named:
    name: str
    kind: str
    drawn_as: str
    """Name by which the simulator draws its service times."""
    is_member: bool = False


def member(
    emulation: Emulation, device: Named, ready: Callable[[], Awaitable[object]]
) -> EmulatedMember:
    """Makes a member; ``ready`` returns once the run may begin."""
    held = emulation.held(device)
    assert isinstance(held, QueuedHeld)
    schedule = emulation.setting.schedule
    lends = schedule.trainer_generates and not schedule.members_generate
    generating = EmulatedDevice(
        emulation.profile, device.kind, held, emulation.sizes,
        first_weights(emulation.setting.seed),
        num_steps=emulation.profile.shape.steps if lends else 1,
    )  # fmt: skip
    concurrent = schedule.staleness_limit > 0
    shard_bytes = emulation.setting.shard_bytes
    return EmulatedMember(generating, held, ready, shard_bytes, steps_concurrently=concurrent)


def member_hosts(setting: Setting) -> list[list[Named]]:
    """Names members, host by host."""
    each = [
        Named(f"trainer-{kind}-{number}".lower(), kind, member_name(kind, number), is_member=True)
        for kind, count in setting.trainer.items()
        for number in range(count)
    ]
    size = setting.host_devices
    return [each[first : first + size] for first in range(0, len(each), size)]


def named_rollout(devices: Mapping[str, int]) -> list[Named]:
    """Names each device that only generates."""
    each = [(kind, number) for kind, count in devices.items() for number in range(count)]
    return [
        Named(f"rollout-{place:02d}-{kind.lower()}", kind, rollout_device(kind, number))
        for place, (kind, number) in enumerate(each)
    ]


def nodes(devices: list[EmulatedRollout]) -> list[list[EmulatedRollout]]:
    """Groups devices that share a host."""
    return [
        devices[first : first + DEVICES_PER_NODE]
        for first in range(0, len(devices), DEVICES_PER_NODE)
    ]
