"""Memory and operations of one model, by the size of its samples: two tables of a cost profile.

A forward pass of one row of the network, with n tokens of latents and t of text, takes

    products with weights    a n + b t + c
    attention                p n^2 + q n t + r t^2

operations. A trained row takes as many again for each pass that it makes: forward, forward again
where activations are not kept, backward (the gradient of what goes in, of the weights as well if
they are trained; two and a half times the attention), and forward without the adapter for the KL.
"""

from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field

from shared.messages.records import Record

Positive = Annotated[int, Field(gt=0, le=2**31)]
Factor = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]

GIB_TO_GB = 2**30 / 1e9
ATTENTION_BACKWARD = 2.5
"""Operations of the attention's backward pass over its forward pass: scores are computed again."""


class Memory(Record):
    """Memory that one model takes at one shape, in GiB: network and text encoders in bfloat16,
    decoder and adapter in float32."""

    height: Positive
    width: Positive
    frames: Positive
    forwards: Literal[1, 2]
    """Forward passes in the figures of a step or a row: 2 with classifier-free guidance."""
    network_gib: Factor
    streamed_gib: Factor
    """Part of the network that stays on a device to which its blocks come one after the other: what
    is in no block, and the two largest blocks."""
    linear_gib: Factor
    """Part of the network that can be quantised: the matrices of its blocks."""
    text_gib: Factor
    decoder_gib: Factor
    adapter_gib: Factor
    adapter_rank: Positive
    denoise_gib: Factor
    """Peak of a denoising step, per sample."""
    decode_gib: Factor
    """Peak of decoding one sample."""
    tiled_gib: Factor
    """The same in tiles."""
    train_gib: NotNegative
    """Part of a training pass's peak, gradients included, that does not grow with its rows."""
    row_gib: Factor
    """Part of a training pass's peak for each row, with gradient checkpointing."""
    offloaded_row_gib: NotNegative = 0.0
    """The same if the inputs of blocks are offloaded to the host; 0 if unknown."""
    offload_gib: NotNegative = 0.0
    """Offloaded part of each row."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleSize:
    """The size of a sample and of its prompt."""

    height: int
    width: int
    frames: int
    text_tokens: int


class NetworkWork(Record):
    """Operations of one row of the network in a forward pass (see above), and the size of the
    samples whose seconds the profile has."""

    height: Positive
    width: Positive
    frames: Positive
    text_tokens: Positive
    clip_tokens: Annotated[int, Field(ge=0)]
    """Tokens besides, of every prompt."""
    pads_text: bool
    """Whether a prompt is padded to `model.text_tokens`; if not, it counts with those above."""
    pixels_per_token: Positive
    """Each way."""
    frames_per_latent: Positive
    token_gflop: Factor
    text_token_gflop: NotNegative
    pair_flop: Factor
    """Operations for each pair of tokens of latents."""
    cross_flop: NotNegative
    """Operations for each pair of a token of latents and one of text."""
    text_pair_flop: NotNegative
    row_gflop: NotNegative = 0.0
    """Operations of every row, of any size: embeddings of time and guidance."""

    @property
    def size(self) -> SampleSize:
        return SampleSize(
            height=self.height, width=self.width, frames=self.frames, text_tokens=self.text_tokens
        )


def forward_tflop(work: NetworkWork, size: SampleSize) -> float:
    """Return the operations of one row's forward pass, in 1e12.

    >>> flux = NetworkWork(height=720, width=720, frames=1, text_tokens=512, clip_tokens=0,
    ...     pads_text=True, pixels_per_token=16, frames_per_latent=1,
    ...     token_gflop=12.91, text_token_gflop=12.91,
    ...     pair_flop=700416, cross_flop=1400832, text_pair_flop=700416)
    >>> size = SampleSize(height=512, width=512, frames=1, text_tokens=512)
    >>> round(forward_tflop(flux, size), 1)
    21.5
    """
    return _products(work, size) + _attention(work, size)


def rho(
    work: NetworkWork,
    size: SampleSize,
    *,
    full: bool,
    recomputes: bool | Literal["selective", "offloaded"],
    kl: bool,
    differentiated: float = 1.0,
) -> float:
    """Return a trained row's operations over a forward pass's operations.

    Args:
        full: all weights are trained, not an adapter.
        recomputes: the forward pass is computed again for the backward pass; selective: all of
            it but the attention.
        kl: the base model's forward pass is computed as well.
        differentiated: share of the forward pass that a backward pass follows.
    """
    attention = _attention(work, size) / forward_tflop(work, size)
    backward = (1 + full) * (1 - attention) + ATTENTION_BACKWARD * attention
    again = 1 - attention if recomputes == "selective" else bool(recomputes)
    return 1 + kl + differentiated * (again + backward)


def num_tokens(work: NetworkWork, size: SampleSize) -> int:
    """Return the number of tokens of a sample's latents, at least one."""
    side = work.pixels_per_token
    latent_frames = (size.frames - 1) // work.frames_per_latent + 1
    return max(1, latent_frames * (size.height // side) * (size.width // side))


def _products(work: NetworkWork, size: SampleSize) -> float:
    latents, text = num_tokens(work, size), _text_tokens(work, size)
    return (work.token_gflop * latents + work.text_token_gflop * text + work.row_gflop) / 1e3


def _attention(work: NetworkWork, size: SampleSize) -> float:
    latents, text = num_tokens(work, size), _text_tokens(work, size)
    pairs = work.pair_flop * latents**2 + work.text_pair_flop * text**2
    return (pairs + work.cross_flop * latents * text) / 1e12


def _text_tokens(work: NetworkWork, size: SampleSize) -> int:
    return (size.text_tokens if work.pads_text else work.text_tokens) + work.clip_tokens
