"""Seconds of a denoising step, a fragment, a training pass and a group, by a cost profile.

Each call takes what the device computes, in H100-seconds over its speed, or what its host takes to
launch the call's kernels, whichever is more.
"""

import math
from collections.abc import Callable
from functools import partial

from services.scheduler.costs.capacity import fits, pass_rows
from services.scheduler.costs.host import UNKNOWN_HOST
from services.scheduler.costs.profile import Profile, Role, device
from services.scheduler.costs.sizes import GIB_TO_GB


def speed(profile: Profile, kind: str, role: Role) -> float:
    """Return the speed relative to an H100; 0 if the device cannot hold the model.

    A device that waits for weights generates as fast as it does in whole groups.
    """
    if fits(profile, kind, role) is not None:
        return 0.0
    kind_of_device = device(profile, kind)
    if role != "rollout":
        return kind_of_device.training_speed
    if kind not in profile.streaming:
        return kind_of_device.generation_speed
    size, computed = profile.shape.group_size, work_alone(profile)
    waits = transfer_seconds(profile, kind, role)
    streamed = _generation_seconds(computed, size, kind_of_device.generation_speed, waits)
    return _generation_seconds(computed, size) / streamed


def denoising_seconds(
    profile: Profile, samples: int, rate: float = 1.0, waits: float = 0.0
) -> float:
    """Return the seconds of a denoising step of this many samples, guidance included, on a device
    of this speed whose weights take ``waits`` seconds to arrive."""
    launches = 0 if profile.launches is None else profile.launches.step
    host = launches * profile.host.step_launch_seconds
    return max(host, waits, profile.step_seconds(samples) / rate)


def pass_seconds(
    profile: Profile, rows: float, rate: float = 1.0, kind: str | None = None
) -> float:
    """Return the seconds of a training pass of this many rows, guidance included: a row of a whole
    group's pass takes `row_seconds`. On a device of a ``kind`` it takes as long as what comes from
    the host and goes there, at least."""
    launches = 0 if profile.launches is None else profile.launches.training_pass
    host = launches * profile.host.training_launch_seconds
    call, row = _pass_parts(profile)
    waits = 0.0 if kind is None else _moves_seconds(profile, kind, rows)
    return max(host, waits, (call + rows * row) / rate)


def _moves_seconds(profile: Profile, kind: str, rows: float) -> float:
    variant = profile.variant
    offloaded = 2 * rows * variant.offload_gib * GIB_TO_GB
    moved = variant.gathers * variant.streamed_gb + offloaded
    return moved / device(profile, kind).host_gb_per_second


def _pass_parts(profile: Profile) -> tuple[float, float]:
    """Return the fixed seconds of a pass, and the seconds of each row."""
    variant = profile.variant
    call = variant.call_factor * profile.rollout.call_seconds
    row = profile.forward_seconds / variant.forwards_per_step - call / profile.shape.group_size
    each = variant.forwards_per_step * variant.rho
    return each * call, each * max(0.0, row)


def row_seconds(profile: Profile) -> float:
    """Return the seconds that an H100 computes for a row of a whole group's pass."""
    return profile.variant.rho * profile.forward_seconds


def passes_seconds(
    profile: Profile, rows: int, most: int, rate: float = 1.0, kind: str | None = None
) -> float:
    """Return the seconds of these rows in passes of ``most`` rows; the last pass has the rest."""
    full, rest = divmod(rows, most)
    last = pass_seconds(profile, rest, rate, kind) if rest else 0.0
    return full * pass_seconds(profile, most, rate, kind) + last


def fragment_seconds(profile: Profile, kind: str, samples: int, role: Role = "rollout") -> float:
    """Return the mean seconds to generate a fragment, in one call per step, and score it, on a
    rollout device or, with the network on it, on one that trains.

    Infinite if the device cannot hold the model.
    """
    if fits(profile, kind, role) is not None:
        return math.inf
    rate, waits = device(profile, kind).generation_speed, transfer_seconds(profile, kind, role)
    return _generation_seconds(profile, samples, rate, waits)


def gradient_seconds(profile: Profile, kind: str, samples: int, role: Role = "member") -> float:
    """Return the mean seconds of the gradient of samples of one group on such a device alone.

    Infinite if the device cannot hold the model.
    """
    rate = speed(profile, kind, "trainer")
    if not rate:
        return math.inf
    return _training_seconds(profile, samples, pass_rows(profile, kind, role), rate, kind)


def work_alone(profile: Profile) -> Profile:
    """Return the costs of devices that no host slows, and that hold any number of rows."""
    variant = profile.variant.model_copy(update={"row_gib": 0.0})
    return profile.model_copy(update={"host": UNKNOWN_HOST, "variant": variant})


def generation_work(profile: Profile) -> float:
    """H100-seconds that a batch takes to generate, decode and score, in whole groups."""
    shape = profile.shape
    return shape.groups * _generation_seconds(work_alone(profile), shape.group_size)


def training_work(profile: Profile) -> float:
    """H100-seconds that a batch takes to train in passes of whole groups, without the
    optimizer's."""
    size = profile.shape.group_size
    return profile.shape.groups * _training_seconds(work_alone(profile), size, size)


def merged_part(profile: Profile) -> float:
    """Return the share of a whole group's training that is in the steps which it computes once, if
    these are a piece of their own."""
    shape = profile.shape
    merged = shape.merged_steps * pass_seconds(profile, 1)
    apart = _unmerged_rows(profile, shape.group_size) * row_seconds(profile)
    return merged / (merged + apart) if merged else 0.0


def _generation_seconds(
    profile: Profile, samples: int, rate: float = 1.0, waits: float = 0.0
) -> float:
    rollout = profile.rollout
    per_sample = rollout.decode_seconds + rollout.reward_seconds
    steps = _over_steps(
        profile, samples, partial(denoising_seconds, profile, rate=rate, waits=waits)
    )
    return steps + (rollout.encode_seconds + samples * per_sample) / rate


def _over_steps(profile: Profile, samples: int, seconds: Callable[[int], float]) -> float:
    """Return the sum over all denoising steps of a fragment, from the seconds of a call of a number
    of samples: of one sample in the steps that the samples share."""
    shape = profile.shape
    alone = (shape.steps - shape.shared_steps) * seconds(samples)
    return alone + shape.shared_steps * seconds(1) if shape.shared_steps else alone


def transfer_seconds(profile: Profile, kind: str, role: Role) -> float:
    """Return the seconds in which the weights of a denoising step come from the host."""
    size, streaming = profile.variant.streamed_gb, profile.streaming.get(kind)
    if role == "rollout":
        size = 0.0 if streaming is None else streaming.host_gib * GIB_TO_GB
    return size / device(profile, kind).host_gb_per_second


def _training_seconds(
    profile: Profile, samples: int, most: int, rate: float = 1.0, kind: str | None = None
) -> float:
    """Return the training seconds of this many samples of one group, in passes of ``most`` rows.
    Rows that they compute once join a pass of other rows, if there is one."""
    apart, merged = _unmerged_rows(profile, samples), profile.shape.merged_steps
    if not apart:
        return merged * pass_seconds(profile, 1, rate, kind)
    _, row = _pass_parts(profile)
    return apart / most * pass_seconds(profile, most, rate, kind) + merged * row / rate


def _unmerged_rows(profile: Profile, samples: int) -> float:
    """Return the trained rows of the steps that each sample computes for itself, on average."""
    shape = profile.shape
    return samples * (shape.trained_steps - shape.merged_steps) * shape.trained_share
