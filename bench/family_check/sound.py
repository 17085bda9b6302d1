"""The state of a video with its sound, from what its pipeline draws of each."""

import torch
from torch import Tensor

from shared.models.sound import sound_columns


def joined(video: Tensor, sound: Tensor) -> Tensor:
    """Join the latents (1, C, F, h, w) of a video and the tokens (L, C) of its sound to one state
    (1, C, F, h, w + columns), as `shared.models.sound` says; cells that are left over are zero."""
    channels, frames, rows = video.shape[1:4]
    columns = sound_columns(len(sound), frames, rows)
    cells = video.new_zeros(1, channels, frames * rows * columns)
    cells[:, :, : len(sound)] = sound.T
    return torch.cat([video, cells.reshape(1, channels, frames, rows, columns)], dim=-1)
