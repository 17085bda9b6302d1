"""The emulated devices of one run, and the services over them: without torch, many per process."""

from collections.abc import Mapping
from dataclasses import dataclass

from digenrl.bench.cluster.blobs import EmulatedWeights
from digenrl.bench.cluster.generation import EmulatedDevice, EmulatedRollout
from digenrl.bench.cluster.hold import Held
from digenrl.bench.cluster.payloads import Scaled, scaled
from digenrl.bench.cluster.setting import DEVICES_PER_NODE, Setting
from digenrl.bench.cluster.training import EmulatedTraining, lanes
from services.scheduler.costs.profile import Profile, Role, device
from shared.contracts import Device

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
        hosts = setting.num_nodes + 1  # and the trainer's
        return cls(setting, profile, scaled(profile, setting.scale, hosts))

    def held(self, name: str) -> Held:
        setting = self.setting
        return Held(name, setting.scale, self.profile.rollout.noise_cv, setting.seed)

    def registered(self, kind: str, role: Role, *, slots: int) -> Device:
        """As a worker on such a device registers."""
        needs = (self.profile.rollout if role == "rollout" else self.profile.variant).memory_gib
        return Device(
            kind=kind,
            memory_bytes=int(device(self.profile, kind).memory_gib * GIB),
            needs_bytes=int(needs * GIB),
            slots=slots,
            fluid=role == "trainer" and self.setting.fluid,
            can_train=role == "rollout" and self.setting.can_train,
        )


def rollout_devices(emulation: Emulation) -> list[EmulatedRollout]:
    first = EmulatedWeights.first(emulation.setting.run).digest
    return [
        EmulatedRollout(emulation.profile, kind, emulation.held(name), emulation.sizes, first)
        for name, kind in named("rollout", emulation.setting.rollout)
    ]


def training(emulation: Emulation) -> EmulatedTraining:
    setting, profile = emulation.setting, emulation.profile
    weights = EmulatedWeights.first(setting.run)
    pool = [(kind, emulation.held(name)) for name, kind in named("trainer", setting.trainer)]
    generating = [
        # Step by step: between two steps a commit, or a lone device's training, may interrupt.
        EmulatedDevice(
            profile, kind, held, emulation.sizes, weights.digest, num_steps=profile.shape.steps
        )
        for kind, held in pool
    ]
    return EmulatedTraining(
        profile=profile,
        devices=lanes(profile, pool, setting.trainer, tsp=setting.tsp),
        generating=generating if setting.lends else (),
        sizes=emulation.sizes,
        weights_in_use=weights,
    )


def named(role: Role, devices: Mapping[str, int]) -> list[tuple[str, str]]:
    """(name, kind) of each device."""
    kinds = [kind for kind, count in devices.items() for _ in range(count)]
    return [(f"{role}-{number:02d}-{kind.lower()}", kind) for number, kind in enumerate(kinds)]


def nodes(devices: list[EmulatedRollout]) -> list[list[EmulatedRollout]]:
    """Devices that share a host."""
    return [
        devices[first : first + DEVICES_PER_NODE]
        for first in range(0, len(devices), DEVICES_PER_NODE)
    ]
