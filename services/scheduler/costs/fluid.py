"""Costs of members: fragments, pieces, exchange, step, snapshot, loading.

Exchange and step are named parts of a profile's variant; where the profile does not name them, they
follow from the bytes that they move and the speeds below.

A member may be a shard group of n ranks. It divides the samples of a fragment and of a piece among
them, and takes as long as the rank that has most; each rank gathers the whole network before
fragments that follow one another. In training, passes gather blocks while others compute, as FSDP2
does: a pass takes what computing or gathering takes, whichever is more. Gradients are scattered in
float32 after each.
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
CHECKPOINT_PARTS = STATE_PARTS - 1
"""Those that are stored after the weights."""
PIECES_EACH = 10
"""Pieces of a device in a batch, about."""
NAME_BYTES, PIECE_BYTES = 14.0, 3.5
"""Bytes of a device and of a piece in the message that names all sums (`ExchangeSums`)."""
BROKER_GB_PER_SECOND = 1.0
"""A broker sends this message to all devices at so much: .8 to 1.9 were measured with 256 readers
of 150 kB, on two cores that they shared."""
PIECE_NAME_SECONDS = 15e-6
"""Seconds in which the scheduler writes a piece of this message and a device reads it: .5 s were
measured for 32,768 pieces."""


def gradient_gb(profile: Profile) -> float:
    """Return the size of a sum of gradients: what is trained, in float32; it is published in
    bfloat16."""
    return 2 * profile.variant.published_gb


def network_gb(profile: Profile) -> float:
    """Return the size of the network as a rank gathers it."""
    if profile.variant.network_gb or profile.memory is None:
        return profile.variant.network_gb
    return profile.memory.network_gib * GIB_TO_GB


def stored_gb(profile: Profile) -> float:
    """Return the size of a version's weights in the store: an adapter's in float32."""
    is_adapter = gradient_gb(profile) <= network_gb(profile)
    return gradient_gb(profile) if is_adapter else profile.variant.published_gb


def exchange_seconds(profile: Profile, devices: int) -> float:
    """Return the seconds in which this many devices form the total of their sums: the message names
    the sums' owners, and a ring adds up the sums within each host, and one across hosts. Parts of
    sums that ranks hold go through the object store: each member stores its sum, the committer
    reads all others and stores the total, which the others read."""
    if profile.variant.exchange_seconds is not None:
        return profile.variant.exchange_seconds
    ranks, size = profile.variant.ranks, gradient_gb(profile)
    if ranks > 1 and size > stored_gb(profile):  # not of an adapter
        members = devices // ranks
        passed = size * (members + 2) if members > 1 else 0.0
        line = LINE_GB_PER_SECOND * math.ceil(ranks / HOST_DEVICES)
        return order_seconds(members) + passed / line
    hosts, of_member = math.ceil(devices / HOST_DEVICES), math.ceil(ranks / HOST_DEVICES)
    inside = max(1, min(devices, HOST_DEVICES) // ranks)
    places = hosts if of_member == 1 else devices // ranks
    between = 2 * (places - 1) / places * (size / of_member) / LINE_GB_PER_SECOND
    ring = between + 2 * (inside - 1) / inside * (size / ranks) / DEVICE_GB_PER_SECOND
    return order_seconds(devices // ranks) + ring


def order_seconds(devices: int) -> float:
    """Return the seconds in which every member receives the names of all sums: the message grows
    with their number, and each member reads it."""
    pieces = min(MAX_PIECES, PIECES_EACH * devices)
    size = NAME_BYTES * devices + PIECE_BYTES * pieces
    return devices * size / BROKER_GB_PER_SECOND / 1e9 + PIECE_NAME_SECONDS * pieces


def step_seconds(profile: Profile) -> float:
    """Return the seconds of the elementwise optimizer step, clipping and checksum included."""
    if profile.variant.step_seconds is not None:
        return profile.variant.step_seconds
    return STEP_PASSES * gradient_gb(profile) / STEP_GB_PER_SECOND / profile.variant.ranks


def snapshot_seconds(profile: Profile, kind: str) -> float:
    """Return the seconds for which the committing member copies its state to its host."""
    each = STATE_PARTS * gradient_gb(profile) / profile.variant.ranks
    return each / device(profile, kind).host_gb_per_second


def load_seconds(profile: Profile) -> float:
    """Return the seconds of fetching a version's weights, moments and average over the line."""
    return STATE_PARTS * _line_seconds(profile)


def weights_seconds(profile: Profile) -> float:
    """Return the seconds in which the committer stores the weights: half of a publication, in the
    other half of which others fetch them."""
    return profile.variant.publish_seconds / 2


def checkpoint_seconds(profile: Profile) -> float:
    """Return the seconds in which it then stores moments and average, as fast as the weights, and
    no faster than the line."""
    return CHECKPOINT_PARTS * max(weights_seconds(profile), _line_seconds(profile))


def _line_seconds(profile: Profile) -> float:
    """Return the seconds in which what is trained crosses the lines of a member's hosts."""
    hosts = math.ceil(profile.variant.ranks / HOST_DEVICES)
    return gradient_gb(profile) / LINE_GB_PER_SECOND / hosts


def commit_seconds(profile: Profile) -> float:
    """Return the seconds from the copy on the host to the commit record, which waits for the state
    as well. One step ahead, so does the training of the next batch, which is generated by then."""
    return weights_seconds(profile) + checkpoint_seconds(profile)


def help_seconds(profile: Profile, kind: str, samples: int) -> float:
    """Return the mean seconds in which a member generates a fragment, and scores it.

    Infinite if the device cannot hold the model.
    """
    most = math.ceil(samples / profile.variant.ranks)
    return fragment_seconds(profile, kind, most, "member")


def gather_seconds(profile: Profile) -> float:
    """Return the seconds in which each rank gathers the whole network from the others."""
    return _between_ranks(profile, network_gb(profile))


def piece_seconds(profile: Profile, kind: str, rows: int, role: Role = "member") -> float:
    """Return the mean seconds of the gradient of a piece of which a device, or the rank with the
    largest part, trains this many rows, in passes of as many as it holds.

    Infinite if the device cannot hold the model.
    """
    rate, variant = speed(profile, kind, "trainer"), profile.variant
    if not rate:
        return math.inf
    most = pass_rows(profile, kind, role)
    calls = math.ceil(rows / most)
    moved = variant.gathers * network_gb(profile) + gradient_gb(profile)
    gathers = calls * variant.forwards_per_step * _between_ranks(profile, moved)
    return max(passes_seconds(profile, rows, most, rate, kind), gathers)


def group_seconds(profile: Profile, kind: str, samples: int, role: Role = "member") -> float:
    """Return the mean seconds of the gradient of this many samples of one group on a member."""
    if profile.variant.ranks == 1:
        return gradient_seconds(profile, kind, samples, role)
    most = math.ceil(samples / profile.variant.ranks)
    return piece_seconds(profile, kind, math.ceil(profile.shape.trained_rows(most)), role)


def _between_ranks(profile: Profile, size: float) -> float:
    """Return the seconds in which each rank of a shard group gathers, or scatters, the missing GB;
    over the network, if the group is on several hosts."""
    ranks = profile.variant.ranks
    link = DEVICE_GB_PER_SECOND if ranks <= HOST_DEVICES else LINE_GB_PER_SECOND
    return size * (ranks - 1) / ranks / link
