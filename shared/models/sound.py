"""Families whose samples are videos with sound: the latents of both are one state.

A sample stays one tensor: further columns of the video's latents hold the tokens of the sound,
frame by frame and row by row. Unused cells have no meaning.
"""

from collections.abc import Callable
from dataclasses import dataclass

from shared.models.family import FamilySpec
from shared.models.sigmas import Config

FRAME_RATE = 24.0
"""Frames of video per second: the default of LTX-2's pipeline."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SoundFamilySpec(FamilySpec):
    sound_tokens: Callable[[Config, int], int]
    """(network's configuration, frames of latents) -> number of sound tokens."""

    def latent_shape(
        self, network: Config, decoder: Config, *, height: int, width: int, frames: int
    ) -> tuple[int, ...]:
        """Returns (C, F, h, w + columns of the sound)."""
        channels, latent_frames, rows, columns = FamilySpec.latent_shape(
            self, network, decoder, height=height, width=width, frames=frames
        )
        added = sound_columns(self.sound_tokens(network, latent_frames), latent_frames, rows)
        return channels, latent_frames, rows, columns + added


def sound_columns(tokens: int, latent_frames: int, rows: int) -> int:
    """Return the number of columns that hold this many tokens.

    >>> sound_columns(5, latent_frames=2, rows=2)
    2
    """
    return -(-tokens // (latent_frames * rows))


def ltx2_sound_tokens(network: Config, latent_frames: int) -> int:
    """Returns the number of sound tokens of a video, as LTX-2's pipeline computes it."""
    frames = (latent_frames - 1) * network["vae_scale_factors"][0] + 1
    rate = network["audio_sampling_rate"] / network["audio_hop_length"]
    return int(round(frames / FRAME_RATE * (rate / float(network["audio_scale_factor"]))))  # noqa: RUF046
