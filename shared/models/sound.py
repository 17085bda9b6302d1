"""Families whose samples are videos with sound: the latents of both are one state.

The tokens of the sound are in columns next to the video's latents, frame by frame and row by row;
unused cells have no meaning. So a sample stays one tensor.
"""

from collections.abc import Callable
from dataclasses import dataclass

from shared.models.family import FamilySpec
from shared.models.sigmas import Config

FRAME_RATE = 24.0
"""Frames of video per second, as LTX-2's pipeline takes them by default."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SoundFamilySpec(FamilySpec):
    sound_tokens: Callable[[Config, int], int]
    """Return the tokens of sound for this many frames of latents, from the network's
    configuration."""

    def latent_shape(
        self, network: Config, decoder: Config, *, height: int, width: int, frames: int
    ) -> tuple[int, ...]:
        """Returns (C, F, h, w and the columns of the sound)."""
        channels, latent_frames, rows, columns = FamilySpec.latent_shape(
            self, network, decoder, height=height, width=width, frames=frames
        )
        more = sound_columns(self.sound_tokens(network, latent_frames), latent_frames, rows)
        return channels, latent_frames, rows, columns + more


def sound_columns(tokens: int, latent_frames: int, rows: int) -> int:
    """Return the columns for this many tokens.

    >>> sound_columns(5, latent_frames=2, rows=2)
    2
    """
    return -(-tokens // (latent_frames * rows))


def ltx2_sound_tokens(network: Config, latent_frames: int) -> int:
    """Returns the tokens of the sound of a video, as LTX-2's pipeline counts them."""
    frames = (latent_frames - 1) * network["vae_scale_factors"][0] + 1
    rate = network["audio_sampling_rate"] / network["audio_hop_length"]
    return int(round(frames / FRAME_RATE * (rate / float(network["audio_scale_factor"]))))  # noqa: RUF046
