"""Defines the records of what devices did in a batch, and the rates that follow from them.

The scheduler writes a record for each committed batch; it reports the same rates during the run as
readers compute from the records afterwards.
"""

import zlib
from collections.abc import Iterable
from statistics import median
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic.config import JsonDict

from shared.limits import MAX_TIMELINE_BYTES

DeviceUse = Literal[
    "generating", "scoring", "training", "committing",
    "waiting_for_rollout", "waiting_for_reward", "waiting_for_trainer", "waiting_for_weights",
    "waiting_for_conditions", "tail", "paused",
]  # fmt: skip
"""tail: nothing is left to issue, and others still generate. waiting_for_weights,
waiting_for_conditions: the device has a fragment, and loads what is to generate it, or no encoder
has stored its prompt's conditions yet."""
BUSY_USES: frozenset[DeviceUse] = frozenset({"generating", "scoring", "training", "committing"})


EXAMPLE_LOAN: JsonDict = {
    "groups": 2, "samples_helped": 6, "reason": "gains most", "predicted_gain": 1.2,
    "measured_gain": 1.1,
}  # fmt: skip


class TagUsage(BaseModel):
    """Help of devices that train in one batch."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True,
        json_schema_extra={"examples": [EXAMPLE_LOAN]},
    )  # fmt: skip

    groups: int
    """Most groups that members were to generate."""
    samples_helped: int
    """Samples that lent members generated."""
    reason: str
    """Cause of this number of groups."""
    predicted_gain: float | None
    """Gain by the forecast at the opening of the batch."""
    measured_gain: float | None
    """Gain over the time that the batch was predicted to take without help."""


class BatchUsage(BaseModel):
    """Use of the devices from the opening of a batch to its commit."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True,
        json_schema_extra={"examples": [{
            "batch": 12, "seconds": 4.2, "devices": {"rollout-0": {"generating": 3.1, "tail": 1.1}},
            "samples": 64, "forecast_seconds": 4.0, "bound_seconds": 3.6, "device_hours": 0.4,
            "tag": EXAMPLE_LOAN,
            "machines": {"rollout-0": "NVIDIA H100 80GB HBM3 0 on node7"},
        }]},
    )  # fmt: skip

    batch: int
    """Number of the batch."""
    seconds: float
    """Seconds from its opening to its commit."""
    devices: dict[str, dict[DeviceUse, float]]
    """Seconds by worker and by what it did."""
    tag: TagUsage | None = None
    """Help of devices that train; null without any."""
    samples: int | None = None
    """Samples of the batch; null if an older release has recorded it, like the following two."""
    forecast_seconds: float | None = None
    """Seconds of such a batch by the schedule's model, with the costs that were learned by its end;
    null if the costs were unknown."""
    bound_seconds: float | None = None
    """Seconds that no schedule beats on the devices of the batch, by the same costs."""
    machines: dict[str, str] = Field(default_factory=dict)
    """Device and host of each worker, in words."""
    device_hours: float | None = None
    """Hours of all devices in the recorded batches of the run up to this one; a GPU is a device,
    and so is a host without one."""

    @classmethod
    def decode(cls, data: bytes | None) -> "BatchUsage | None":
        """Return a stored record; None if the record is missing or damaged."""
        try:
            return None if data is None else cls.model_validate_json(data)
        except ValidationError:
            return None


Change = tuple[float, DeviceUse | None]
"""Seconds since the batch was opened, and what a device does from then on; None: it is not
there."""


class Timeline(BaseModel):
    """When the devices changed what they did, from the opening of a batch to its commit."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True,
        json_schema_extra={"examples": [{
            "batch": 12, "seconds": 4.2, "ended_at": 1.8e9,
            "devices": {"rollout-0": [[0.0, "generating"], [3.1, "tail"]]},
        }]},
    )  # fmt: skip

    batch: int
    """Number of the batch."""
    seconds: float
    """Seconds from its opening to its commit, or to now while it is in flight."""
    devices: dict[str, tuple[Change, ...]]
    """Maps each worker to pairs in order of time: seconds since the batch was opened, and the
    worker's use from then on, until the end; null if the worker was absent."""
    ended_at: float | None = None
    """Unix time of its commit, or of now while it is in flight."""

    def encode(self) -> bytes:
        return zlib.compress(self.model_dump_json().encode())

    @classmethod
    def decode(cls, data: bytes) -> "Timeline | None":
        """Return a stored timeline; None if its bytes are damaged."""
        inflated = zlib.decompressobj()
        try:
            return cls.model_validate_json(inflated.decompress(data, MAX_TIMELINE_BYTES))
        except (zlib.error, ValidationError):
            return None


def seconds_per_step(seconds: Iterable[float]) -> float | None:
    """Return the median step time; None without a step."""
    times = [*seconds]
    return round(median(times), 3) if times else None


def per_second(samples: int, seconds: float | None) -> float | None:
    """Return samples per second of a batch that takes so long; None if that is not known."""
    return samples / seconds if seconds else None


def count_staleness(samples: Iterable[tuple[int, int]]) -> dict[int, int]:
    """Return the number of samples by staleness, from pairs of a staleness and a number."""
    counts: dict[int, int] = {}
    for steps, number in samples:
        counts[steps] = counts.get(steps, 0) + number
    return counts
