"""What moves between the services for one model, in bytes, at full scale.

Window states are the trained steps' latents and one more (K + 1), in bf16, as recipes with
`sampling.state_dtype = "bfloat16"` store them; adapters and gradients are float32. Where the
samples of a group begin at one state, a fragment has that one once, and each sample K. Media are
what the decoder gives, one byte per channel; conditions are the prompt's embeddings in bf16.

| model | latent | window | media | conditions |
|---|---|---|---|---|
| Qwen-Image 512x512, K 2 | 16x64x64 | 3 states | 3x512x512 | 2 x 150 tokens x 3584 |
| FLUX.1-dev 720x720, K 9 | 16x90x90 | 10 states | 3x720x720 | 512 x 4096 and 768 |
| Wan2.1-14B 240x416x33, K 10 | 16x9x30x52 | 11 states | 33x3x240x416 | 2 x 512 x 4096 |
| HunyuanVideo 480x480x53, K 9 | 16x14x60x60 | 10 states | 53x3x480x480 | 256 x 4096 and 768 |

Shapes follow from the models' configurations (VAE strides 8x8, in time 4). Lengths of prompts are
assumed: the longest that the model takes, Qwen-Image's 150 tokens excepted. Two rows of conditions
are with guidance.
"""

import math
from dataclasses import dataclass

from bench.cluster.shipped import FLOAT32_OVER_PUBLISHED
from digenrl.trace.device_profile.models import ARCHITECTURES, ModelName
from services.scheduler.costs import fluid
from services.scheduler.costs.profile import Profile
from shared.errors import UserError

BF16 = 2
FLOAT32 = 4
GUIDANCE = 2.0
"""Any that is more than none."""
MEMORY_SHARE = 2
"""Hashing and writing, then reading and hashing 0.85 GB takes two cores twice the 0.85 s that the
profile allows."""
MIN_BYTES = 256


@dataclass(frozen=True, slots=True)
class Payload:
    """Bytes at full scale."""

    window: int
    """One sample's states in the trained window."""
    start: int
    """One fragment's state that all its samples begin the window at; 0 if each has its own."""
    media: int
    """One sample's pixels."""
    conditions: int
    """One prompt's conditioning."""


PROMPT_TOKENS = {"qwen-image": 150, "flux1-dev": 512, "wan2.1-14b": 512, "hunyuanvideo": 256}
"""Cost profile -> tokens of a prompt, which are assumed."""


def payload_of(profile: Profile) -> Payload:
    """Raises UserError if nothing is known of what the model's samples weigh."""
    if profile.name not in PROMPT_TOKENS:
        known = ", ".join(PROMPT_TOKENS)
        raise UserError(f"no payload for the profile {profile.name}; known are {known}")
    architecture = ARCHITECTURES[ModelName(profile.name)]
    family, network, size = architecture.family, architecture.config, architecture.size
    latents = family.latent_shape(
        network, architecture.decoder, height=size.height, width=size.width, frames=size.frames
    )
    shapes = family.condition_shapes(network, PROMPT_TOKENS[profile.name])
    embeddings = sum(map(math.prod, shapes.values()))
    state, shape = math.prod(latents) * BF16, profile.shape
    return Payload(
        window=(shape.trained_steps + (0 if shape.merged_steps else 1)) * state,
        start=state if shape.merged_steps else 0,
        media=size.frames * 3 * size.height * size.width,
        conditions=family.forwards(GUIDANCE) * embeddings * BF16,
    )


@dataclass(frozen=True, slots=True)
class Scaled:
    """Whole bytes in the emulated cluster."""

    window: int
    start: int
    media: int
    conditions: int
    adapter: int
    checkpoint: int = 1024
    """The optimizer's state: it goes to the store beside the next batch, and nothing waits for it,
    so that only its seconds count where bytes are scaled."""


def whole(profile: Profile) -> Scaled:
    """Returns every byte that a run moves: states in float32 as well, as recipes store them that do
    not say otherwise, and an optimizer's state of two moments and an average."""
    payload = payload_of(profile)
    adapter = round(FLOAT32_OVER_PUBLISHED * profile.variant.published_gb * 1e9)
    return Scaled(
        window=FLOAT32 // BF16 * payload.window,
        start=FLOAT32 // BF16 * payload.start,
        media=payload.media,
        conditions=payload.conditions,
        adapter=adapter,
        checkpoint=fluid.CHECKPOINT_PARTS * adapter,
    )


def scaled(profile: Profile, scale: float, hosts: int, member_hosts: int = 1) -> Scaled:
    """Divides bytes by ``scale``; adapters by `MEMORY_SHARE` x ``hosts`` as well: all
    hosts of the emulated cluster move them through the memory of one machine. So do hosts of
    fluid devices with samples, which each member reads that trains a part of their group: those
    are divided by ``member_hosts``, and each host moves what one does.
    """
    payload = payload_of(profile)
    samples = scale * member_hosts
    adapter = FLOAT32_OVER_PUBLISHED * profile.variant.published_gb * 1e9
    adapter /= scale * MEMORY_SHARE * hosts

    def at_least(number: float) -> int:
        return max(MIN_BYTES, round(number))

    return Scaled(
        window=at_least(payload.window / samples),
        start=at_least(payload.start / samples) if payload.start else 0,
        media=at_least(payload.media / samples),
        conditions=at_least(payload.conditions / samples),
        adapter=at_least(adapter),
    )
