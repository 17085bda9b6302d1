"""LTX-2: text-to-video with sound, classifier-free guidance.

Video and sound attend to each other, so the state of a sample has both (`shared.models.sound`), and
both are sampled and trained. Only the video is decoded: no reward uses the sound.
"""

from typing import ClassVar

import torch
from torch import Tensor

from shared.diffusion.families.base import NEGATIVE, Family
from shared.diffusion.loading.models import Conditions
from shared.errors import UserError
from shared.models.sigmas import TRAIN_TIMESTEPS
from shared.models.sound import FRAME_RATE, ltx2_sound_tokens, sound_columns


class LTX2(Family):
    leaves_out: ClassVar[tuple[str, ...]] = ("audio_vae", "vocoder", "processor")

    def encode_prompt(self, prompt: str, *, negative: str | None) -> Conditions:
        self._check_tokens()
        text, mask, empty, empty_mask = self.pipeline.encode_prompt(
            prompt,
            negative,
            do_classifier_free_guidance=negative is not None,
            max_sequence_length=self.text_tokens,
        )
        embeddings = self._connected(text, mask)
        if negative is None:
            return embeddings
        return embeddings | {
            NEGATIVE + name: each for name, each in self._connected(empty, empty_mask).items()
        }

    def forward(
        self, latents: Tensor, sigma: Tensor, conditions: Conditions, guidance: float
    ) -> Tensor:
        video, sound, left = self._parts(latents)
        frames, height, width = video.shape[2:]
        time = sigma * TRAIN_TIMESTEPS
        made_video, made_sound = self.transformer(
            hidden_states=video.flatten(2).transpose(1, 2).to(self.dtype),
            audio_hidden_states=sound.transpose(1, 2).to(self.dtype),
            encoder_hidden_states=conditions["text"].to(self.dtype),
            audio_encoder_hidden_states=conditions["sound_text"].to(self.dtype),
            timestep=time,
            sigma=time,
            num_frames=frames,
            height=height,
            width=width,
            fps=FRAME_RATE,
            audio_num_frames=sound.shape[2],
            use_cross_timestep=True,
            return_dict=False,
        )
        columns = torch.cat([made_sound.transpose(1, 2), left.new_zeros(left.shape)], dim=2)
        return torch.cat(
            [
                made_video.transpose(1, 2).reshape(video.shape),
                columns.reshape(*video.shape[:2], frames, height, -1),
            ],
            dim=-1,
        )

    def decode_latents(self, latents: Tensor) -> Tensor:
        vae = self.pipeline.vae
        video = self._parts(latents)[0]
        mean, deviation = (
            each.view(1, -1, 1, 1, 1).to(latents) for each in (vae.latents_mean, vae.latents_std)
        )
        unscaled = video * deviation / vae.config.scaling_factor + mean
        decoded: Tensor = vae.decode(unscaled, None, return_dict=False)[0]
        return decoded.transpose(1, 2)

    def _parts(self, latents: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Divide latents (B, C, F, h, w + columns) into the video (B, C, F, h, w), the sound (B, C,
        L), and the rest."""
        frames, rows, columns = latents.shape[2:]
        tokens = ltx2_sound_tokens(self.config, frames)
        more = sound_columns(tokens, frames, rows)
        video, sound = latents.split([columns - more, more], dim=-1)
        cells = sound.flatten(2)
        return video, cells[:, :, :tokens], cells[:, :, tokens:]

    def _connected(self, text: Tensor, mask: Tensor) -> Conditions:
        """Returns what the network takes of an encoded prompt: (1, L, width) for the video and for
        the sound, in which learned tokens stand for padding, so that none is masked."""
        video, sound, _ = self.pipeline.connectors(text, mask, padding_side="left")
        return {"text": video, "sound_text": sound}

    def _check_tokens(self) -> None:
        multiple = self.pipeline.connectors.config.video_connector_num_learnable_registers
        if not multiple:
            raise UserError(
                "model.folder: its connectors mask the padding of a text, which the adapter does "
                "not know; choose LTX-2"
            )
        if self.text_tokens % multiple:
            raise UserError(
                f"model.text_tokens: {self.text_tokens} is not a multiple of {multiple}, which "
                "this model's texts are padded to"
            )
