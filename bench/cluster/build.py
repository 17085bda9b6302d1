"""The emulated devices of one run, and the services over them: without torch, many per process."""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass

from bench.cluster.blobs import EmulatedWeights
from bench.cluster.generation import EmulatedDevice, EmulatedRollout
from bench.cluster.hold import Held, QueuedHeld
from bench.cluster.ledger import Ledger
from bench.cluster.members import EmulatedMember, first_weights
from bench.cluster.payloads import Scaled, scaled, whole
from bench.cluster.setting import DEVICES_PER_NODE, Setting
from bench.cluster.stores import Line
from bench.cluster.training import EmulatedTraining, lanes
from services.scheduler.costs import fluid
from services.scheduler.costs.noise import Noise, rollout_device, trainer_device
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
        found = {weights_folder(run): self.line()}
        if self.setting.has_members:
            seconds = fluid.checkpoint_seconds(self.profile) / scale
            found[checkpoints_folder(run)] = Line(seconds / self.sizes.checkpoint)
        return found

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
            independent_devices=role == "trainer" and self.setting.independent_devices,
        )


def rollout_devices(emulation: Emulation) -> list[EmulatedRollout]:
    first = EmulatedWeights.first(emulation.setting.seed).digest
    return [
        EmulatedRollout(emulation.profile, each.kind, emulation.held(each), emulation.sizes, first)
        for each in named("rollout", emulation.setting.rollout)
    ]


def training(emulation: Emulation) -> EmulatedTraining:
    setting, profile = emulation.setting, emulation.profile
    weights = EmulatedWeights.first(setting.seed)
    ledger = Ledger(profile.shape.group_size, profile.shape.trained_steps)
    pool = [(each.kind, emulation.held(each)) for each in named("trainer", setting.trainer)]
    generating = [
        # Step by step: between two steps a commit, or a lone device's training, may interrupt.
        EmulatedDevice(
            profile, kind, held, emulation.sizes, weights.digest, num_steps=profile.shape.steps
        )
        for kind, held in pool
    ]
    return EmulatedTraining(
        profile=profile,
        devices=lanes(
            profile,
            pool,
            ledger,
            start=emulation.sizes.start,
        ),
        generating=generating if setting.schedule.trainer_generates else (),
        sizes=emulation.sizes,
        weights_in_use=weights,
        sampling=weights,
        ledger=ledger,
        shard_bytes=setting.shard_bytes,
        updates=setting.updates,
        lags=setting.lags,
    )


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
    """Makes a fluid device; ``ready`` returns once the run may begin."""
    held = emulation.held(device)
    assert isinstance(held, QueuedHeld)
    generating = EmulatedDevice(
        emulation.profile, device.kind, held, emulation.sizes,
        first_weights(emulation.setting.seed),
    )  # fmt: skip
    beside = emulation.setting.schedule.staleness_limit > 0
    return EmulatedMember(
        generating, held, ready, emulation.setting.shard_bytes, steps_beside=beside
    )


def member_hosts(setting: Setting) -> list[list[Named]]:
    """Names fluid devices, host by host."""
    each = [
        Named(f"trainer-{kind}-{number}".lower(), kind, member_name(kind, number), is_member=True)
        for kind, count in setting.trainer.items()
        for number in range(count)
    ]
    size = setting.host_devices
    return [each[first : first + size] for first in range(0, len(each), size)]


def named(role: Role, devices: Mapping[str, int]) -> list[Named]:
    """Names each device of a pool."""
    each = [(kind, number) for kind, count in devices.items() for number in range(count)]
    return [
        Named(
            f"{role}-{place:02d}-{kind.lower()}",
            kind,
            trainer_device(place) if role == "trainer" else rollout_device(kind, number),
        )
        for place, (kind, number) in enumerate(each)
    ]


def nodes(devices: list[EmulatedRollout]) -> list[list[EmulatedRollout]]:
    """Groups devices that share a host."""
    return [
        devices[first : first + DEVICES_PER_NODE]
        for first in range(0, len(devices), DEVICES_PER_NODE)
    ]
