"""Devices by kind, divided between rollout and trainer."""

from collections.abc import Mapping
from dataclasses import dataclass

Devices = Mapping[str, int]
"""Kind -> number of devices."""


@dataclass(frozen=True, slots=True)
class Split:
    rollout: Devices
    trainer: Devices

    @property
    def devices(self) -> Devices:
        """Both together."""
        kinds = dict.fromkeys([*self.trainer, *self.rollout])
        return {kind: self.rollout.get(kind, 0) + self.trainer.get(kind, 0) for kind in kinds}

    def __str__(self) -> str:
        return f"{words(self.rollout)} : {words(self.trainer)}"


def present(devices: Devices) -> dict[str, int]:
    """Return the kinds of which there is a device."""
    return {kind: count for kind, count in devices.items() if count}


def words(devices: Devices) -> str:
    """
    >>> words({"H100": 2, "A100": 0, "L40S": 16})
    '2 H100 + 16 L40S'
    """
    return " + ".join(f"{count} {kind}" for kind, count in present(devices).items()) or "none"
