"""Costs of members: fragments, pieces, exchange, step, snapshot, loading.

A profile can contain the seconds of exchange and step. Otherwise they are computed from the moved
bytes and the speeds below.

A member may be a shard group of n ranks. The ranks divide the samples of a fragment and of a piece,
and the rank with the most samples determines the time. For generation, each rank gathers the whole
network once before several fragments. In training, FSDP2 gathers the next block while a block
computes: a pass takes the maximum of the computing and the gathering time. After each pass,
gradients are scattered in float32.
"""

import math

from services.scheduler.costs.capacity import pass_rows
from services.scheduler.costs.profile import Profile, Role, device
from services.scheduler.costs.seconds import (
    fragment_seconds,
    gradient_seconds,
    passes_seconds,
    speed,
)
from services.scheduler.costs.sizes import GIB_TO_GB
from shared.limits import MAX_PIECES

HOST_DEVICES = 8
"""Default number of devices of a host."""
LINE_GB_PER_SECOND = 12.5
"""Bandwidth between hosts: 100 Gbit/s."""
DEVICE_GB_PER_SECOND = 150.0
"""Bandwidth between the devices of a host."""
STEP_PASSES = 17
"""Number of reads and writes of a float32 copy of the trained weights in a step: 3 for norm and
clipping, 7 for AdamW, 3 for the average, 4 for the checksum."""
STEP_GB_PER_SECOND = 580.0
"""Memory bandwidth of a step with many small tensors: fitted to 0.05 s for the adapter of
Qwen-Image on an H100."""
STATE_PARTS = 4
"""Number of float32 copies in the training state: weights, two moments and an average."""
CHECKPOINT_PARTS = STATE_PARTS - 1
"""Copies that are stored after the weights: two moments and an average."""
PIECES_EACH = 10
"""Approximate number of pieces of a device in a batch."""
NAME_BYTES, PIECE_BYTES = 14.0, 3.5
"""Bytes for a device and for a piece in an `ExchangeSums` message, which lists all sums."""
BROKER_GB_PER_SECOND = 1.0
"""Rate at which a broker sends this message to all devices: 0.8 to 1.9 were measured with 256
readers of 150 kB on two cores."""
PIECE_NAME_SECONDS = 15e-6
"""Seconds for writing and reading one piece of this message: 0.5 s were measured for 32,768
pieces."""


def gradient_gb(profile: Profile) -> float:
    """Return the size of a gradient sum: float32 has twice the bytes of the published bfloat16."""
    return 2 * profile.variant.published_gb


def network_gb(profile: Profile) -> float:
    """Return the size of the network in the type in which ranks gather it."""
    if profile.variant.network_gb or profile.memory is None:
        return profile.variant.network_gb
    return profile.memory.network_gib * GIB_TO_GB


def stored_gb(profile: Profile) -> float:
    """Return the size of a version's weights in the store; an adapter is stored in float32."""
    is_adapter = gradient_gb(profile) <= network_gb(profile)
    return gradient_gb(profile) if is_adapter else profile.variant.published_gb


def exchange_seconds(profile: Profile, devices: int) -> float:
    """Return the seconds in which this many devices add up their sums.

    Whole sums are added by a ring within each host and a ring across hosts. Sharded sums go through
    the object store: each member stores its sum, the committer reads all sums and stores the total,
    and the other members read the total."""
    if profile.variant.exchange_seconds is not None:
        return profile.variant.exchange_seconds
    ranks, size = profile.variant.ranks, gradient_gb(profile)
    if ranks > 1 and size > stored_gb(profile):  # sharded sums; an adapter is not sharded
        members = devices // ranks
        passed = size * (members + 2) if members > 1 else 0.0
        line = LINE_GB_PER_SECOND * math.ceil(ranks / HOST_DEVICES)
        return order_seconds(members) + passed / line
    hosts, member_hosts = math.ceil(devices / HOST_DEVICES), math.ceil(ranks / HOST_DEVICES)
    members_per_host = max(1, min(devices, HOST_DEVICES) // ranks)
    nodes = hosts if member_hosts == 1 else devices // ranks
    between = 2 * (nodes - 1) / nodes * (size / member_hosts) / LINE_GB_PER_SECOND
    within = 2 * (members_per_host - 1) / members_per_host * (size / ranks) / DEVICE_GB_PER_SECOND
    return order_seconds(devices // ranks) + between + within


def order_seconds(devices: int) -> float:
    """Return the seconds in which all members receive the `ExchangeSums` message, whose size grows
    with the number of members."""
    pieces = min(MAX_PIECES, PIECES_EACH * devices)
    size = NAME_BYTES * devices + PIECE_BYTES * pieces
    return devices * size / BROKER_GB_PER_SECOND / 1e9 + PIECE_NAME_SECONDS * pieces


def step_seconds(profile: Profile) -> float:
    """Return the seconds of the optimizer step, with clipping and checksum."""
    if profile.variant.step_seconds is not None:
        return profile.variant.step_seconds
    return STEP_PASSES * gradient_gb(profile) / STEP_GB_PER_SECOND / profile.variant.ranks


def snapshot_seconds(profile: Profile, kind: str) -> float:
    """Return the seconds in which the committing member copies its state to its host."""
    each = STATE_PARTS * gradient_gb(profile) / profile.variant.ranks
    return each / device(profile, kind).host_gb_per_second


def load_seconds(profile: Profile) -> float:
    """Return the seconds in which a member downloads a version's weights, moments and average."""
    return STATE_PARTS * _line_seconds(profile)


def weights_seconds(profile: Profile) -> float:
    """Return the seconds in which the committer stores the weights: half of the publication. In the
    other half, other devices download the weights."""
    return profile.variant.publish_seconds / 2


def checkpoint_seconds(profile: Profile) -> float:
    """Return the seconds in which the committer stores moments and average, at the rate of the
    weights and at most at the bandwidth between hosts."""
    return CHECKPOINT_PARTS * max(weights_seconds(profile), _line_seconds(profile))


def _line_seconds(profile: Profile) -> float:
    """Return the seconds in which a gradient sum crosses the network links of a member."""
    hosts = math.ceil(profile.variant.ranks / HOST_DEVICES)
    return gradient_gb(profile) / LINE_GB_PER_SECOND / hosts


def commit_seconds(profile: Profile) -> float:
    """Return the seconds from the copy on the host to the commit record, which follows weights and
    checkpoint. With one-step asynchrony, training of the next batch waits for the record as well.
    """
    return weights_seconds(profile) + checkpoint_seconds(profile)


def help_seconds(profile: Profile, kind: str, samples: int) -> float:
    """Return the mean seconds in which a member generates and scores a fragment.

    Infinite if the model does not fit in the device's memory.
    """
    samples_per_rank = math.ceil(samples / profile.variant.ranks)
    return fragment_seconds(profile, kind, samples_per_rank, "member")


def gather_seconds(profile: Profile) -> float:
    """Return the seconds in which each rank gathers the whole network from the others."""
    return _between_ranks(profile, network_gb(profile))


def piece_seconds(profile: Profile, kind: str, rows: int, role: Role = "member") -> float:
    """Return the mean seconds in which a device, or a rank, trains this many rows of a piece.

    Passes have as many rows as fit. Infinite if the model does not fit in the device's memory.
    """
    rate, variant = speed(profile, kind, "trainer"), profile.variant
    if not rate:
        return math.inf
    rows_per_pass = pass_rows(profile, kind, role)
    calls = math.ceil(rows / rows_per_pass)
    moved = variant.gathers * network_gb(profile) + gradient_gb(profile)
    gathers = calls * variant.forwards_per_step * _between_ranks(profile, moved)
    return max(passes_seconds(profile, rows, rows_per_pass, rate, kind), gathers)


def group_seconds(profile: Profile, kind: str, samples: int, role: Role = "member") -> float:
    """Return the mean seconds in which a member trains this many samples of one group."""
    if profile.variant.ranks == 1:
        return gradient_seconds(profile, kind, samples, role)
    rows = profile.shape.trained_rows(math.ceil(samples / profile.variant.ranks))
    return piece_seconds(profile, kind, math.ceil(rows), role)


def _between_ranks(profile: Profile, size: float) -> float:
    """Return the seconds in which each rank of a shard group gathers or scatters ``size`` GB; a
    group on several hosts uses the network."""
    ranks = profile.variant.ranks
    link = DEVICE_GB_PER_SECOND if ranks <= HOST_DEVICES else LINE_GB_PER_SECOND
    return size * (ranks - 1) / ranks / link
