"""What fluid devices take beside generating and training: exchange, step, snapshot, loading.

Each is a named part of a profile's variant; where the profile does not name it, it follows from the
bytes that it moves and the speeds below.
"""

import math

from services.scheduler.costs.profile import Profile, device, pass_seconds, speed
from shared.messages.fluid import MAX_PIECES

HOST_DEVICES = 8
"""Devices of a host, unless said."""
LINE_GB_PER_SECOND = 12.5
"""Between hosts: 100 Gbit/s."""
DEVICE_GB_PER_SECOND = 150.0
"""Between the devices of a host."""
STEP_PASSES = 17
"""Times that a step reads or writes as much as the trained weights have in float32: 3 for norm and
clipping, 7 for AdamW, 3 for the average, 4 for the checksum of all."""
STEP_GB_PER_SECOND = 580.0
"""GB per second at which it does so, in many small tensors: fitted to .05 s for the adapter of
Qwen-Image on an H100."""
STATE_PARTS = 4
"""Weights, two moments and an average, each in float32."""
PIECES_EACH = 10
"""Pieces of a device in a batch, about."""
NAME_BYTES, PIECE_BYTES = 14.0, 3.5
"""Bytes of a device and of a piece in the message that names all sums (`ExchangeSums`)."""
BROKER_GB_PER_SECOND = 1.0
"""A broker sends this message to all devices at so much: .8 to 1.9 were measured with 256 readers
of 150 kB, on two cores that they shared."""
NAMED_SECONDS = 15e-6
"""Seconds in which the scheduler writes a piece of this message and a device reads it: .5 s were
measured for 32,768 pieces."""


def gradient_gb(profile: Profile) -> float:
    """Return the size of a sum of gradients: what is trained, in float32; it is published in
    bfloat16."""
    return 2 * profile.variant.published_gb


def exchange_seconds(profile: Profile, devices: int) -> float:
    """Return the seconds in which so many devices form the total of their sums: they are told whose
    those are, and add them up by a ring within each host, and one of the hosts."""
    if profile.variant.exchange_seconds is not None:
        return profile.variant.exchange_seconds
    size, hosts = gradient_gb(profile), math.ceil(devices / HOST_DEVICES)
    inside = min(devices, HOST_DEVICES)
    between = 2 * (hosts - 1) / hosts * size / LINE_GB_PER_SECOND
    ring = between + 2 * (inside - 1) / inside * size / DEVICE_GB_PER_SECOND
    return order_seconds(devices) + ring


def order_seconds(devices: int) -> float:
    """Return the seconds in which all are told of all sums: the message grows with their number,
    and each of them reads it."""
    pieces = min(MAX_PIECES, PIECES_EACH * devices)
    size = NAME_BYTES * devices + PIECE_BYTES * pieces
    return devices * size / BROKER_GB_PER_SECOND / 1e9 + NAMED_SECONDS * pieces


def step_seconds(profile: Profile) -> float:
    """Return the seconds of the elementwise optimizer step, clipping and checksum included."""
    if profile.variant.step_seconds is not None:
        return profile.variant.step_seconds
    return STEP_PASSES * gradient_gb(profile) / STEP_GB_PER_SECOND


def snapshot_seconds(profile: Profile, kind: str) -> float:
    """Return the seconds for which the committing device copies its state to its host."""
    return STATE_PARTS * gradient_gb(profile) / device(profile, kind).host_gb_per_second


def load_seconds(profile: Profile) -> float:
    """Return the seconds of fetching a version's weights, moments and average over the line."""
    return STATE_PARTS * gradient_gb(profile) / LINE_GB_PER_SECOND


def piece_seconds(profile: Profile, kind: str, samples: int, steps: int) -> float:
    """Return the mean seconds of a piece's gradient. A pass has as many rows as a group has samples
    at most, and a smaller one takes as long to call.

    Infinite if the device cannot hold the model.
    """
    rate = speed(profile, kind, "trainer")
    if not rate:
        return math.inf
    rows = samples * steps
    return pass_seconds(profile, rows=rows, calls=math.ceil(rows / profile.shape.group_size)) / rate
