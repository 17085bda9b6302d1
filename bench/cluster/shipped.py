"""Costs of a run as the product makes it: parts with names, where a profile fits several as one.

| part | seconds | source |
|---|---|---|
| exchange of sums | `fluid.exchange_seconds` | bytes over 100 Gbit/s, and within a host |
| optimizer step | `fluid.step_seconds` | bytes that it moves; .05 s for Qwen-Image's adapter |
| snapshot | `fluid.snapshot_seconds` | weights, moments and average over PCIe |
| publication | twice `publish_seconds` | measured in bfloat16; the product stores float32 |
| checkpoint | `fluid.checkpoint_seconds` | moments and average, as fast as the weights |
| small pieces | `fluid.piece_seconds` | `rollout.call_seconds` for each call, as in generation |
| scoring | in `fragment_seconds` | `rollout.reward_seconds`, on the device that generates |

A profile's `optimizer_seconds` are fitted to other systems' steps, publication included, and its
batches have two updates; a recipe's have one here.
"""

from collections.abc import Mapping

from services.scheduler.costs import fluid
from services.scheduler.costs.profile import Profile

FLOAT32_OVER_PUBLISHED = 2
"""Profiles count what is published in bfloat16, and the product stores float32."""


def shipped(profile: Profile, trainer: Mapping[str, int]) -> Profile:
    """Return the costs with one update per batch, made of its parts.

    Args:
        trainer: devices that train, by kind.
    """
    kinds = [kind for kind, count in trainer.items() if count]
    copied = max((fluid.snapshot_seconds(profile, kind) for kind in kinds), default=0.0)
    together = fluid.exchange_seconds(profile, sum(trainer.values())) if kinds else 0.0
    variant = profile.variant.model_copy(
        update={
            "optimizer_seconds": fluid.step_seconds(profile) + together + copied,
            "publish_seconds": FLOAT32_OVER_PUBLISHED * profile.variant.publish_seconds,
        }
    )
    shape = profile.shape.model_copy(update={"updates": 1})
    return profile.model_copy(update={"variant": variant, "shape": shape})
