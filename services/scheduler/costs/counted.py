"""Costs by counting: what a recipe takes where nothing was measured, in rows of the network.

A row's forward pass takes one second on every device, a backward pass two, and nothing else takes
any: neither decoding and scoring nor handing over weights. The seconds of a batch are then wrong,
but not their division between generation and training.
"""

from services.scheduler.costs.profile import Device, Profile, Rollout, Variant
from services.scheduler.costs.shape import BACKWARD, Shape

COUNTED = "counted"
"""Name of such a profile."""
DEVICE = "device"
"""The one kind of device of such a profile."""
NEGLIGIBLE_SECONDS = 1e-9


def counted_profile(
    shape: Shape, *, forward_only_passes: float, ranks: int = 1, differentiated: float = 1.0
) -> Profile:
    """Return a profile in which seconds are rows of the network.

    Args:
        forward_only_passes: forward passes of a trained row besides the one with a backward pass.
        differentiated: share of a trained row's forward pass that a backward pass follows.
        ranks: devices of a shard group.
    """
    return Profile(
        name=COUNTED,
        description="rows of the network, without any measurement",
        shape=shape,
        rollout=Rollout(
            call_seconds=0.0,
            sample_seconds=1.0,
            decode_seconds=0.0,
            reward_seconds=0.0,
            noise_cv=0.0,
            handoff_seconds=0.0,
            memory_gib=NEGLIGIBLE_SECONDS,
        ),
        variant=Variant(
            forwards_per_step=1,
            rho=1 + BACKWARD * differentiated + forward_only_passes,
            memory_gib=NEGLIGIBLE_SECONDS,
            ranks=ranks,
            network_gb=NEGLIGIBLE_SECONDS,
            optimizer_seconds=0.0,
            published_gb=NEGLIGIBLE_SECONDS,
            publish_seconds=0.0,
            adopt_seconds=0.0,
            switch_seconds=0.0,
        ),
        devices={DEVICE: Device(generation_speed=1.0, training_speed=1.0, memory_gib=1.0)},
        sources={},
        streaming={},
    )
