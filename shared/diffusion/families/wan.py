"""Wan 2.1, and 2.2 with an expert for high and one for low noise: text-to-video; and their
image-to-video models, which receive the image as an additional input for the video's first
frame."""

import torch
from torch import Tensor, nn

from shared.diffusion.families.base import NEGATIVE, Family
from shared.diffusion.families.latents import as_picture, in_model_space, normalised, standardised
from shared.diffusion.loading.experts import LOW, Experts
from shared.diffusion.loading.models import IMAGE, Conditions
from shared.models.sigmas import TRAIN_TIMESTEPS

IMAGE_EMBEDDING = f"{IMAGE}_seen"
"""CLIP's embedding of the first frame; Wan2.2 does not use it."""
NETWORK_TEXT = 512
"""Tokens of text that the network of Wan2.1 expects in front of an image's."""


class Wan(Family):
    def network(self) -> nn.Module:
        second = getattr(self.pipeline, LOW, None)
        if second is None:
            return super().network()
        boundary = self.pipeline.config.boundary_ratio
        experts = Experts(self.pipeline.transformer, second, boundary=boundary)
        return experts.requires_grad_(False).eval()

    def strength(self, guidance: float, sigma: Tensor, like: Tensor) -> float | Tensor:
        if self.guidance_2 is None or not isinstance(self.transformer, Experts):
            return guidance
        is_high = self.transformer.is_high(_timestep(sigma)).reshape(-1, *[1] * (like.dim() - 1))
        return torch.where(is_high, guidance, self.guidance_2).to(like)

    def encode_prompt(self, prompt: str, *, negative: str | None) -> Conditions:
        text, empty = self.pipeline.encode_prompt(
            prompt,
            negative,
            do_classifier_free_guidance=negative is not None,
            max_sequence_length=self.text_tokens,
        )
        return {"text": text} | ({} if negative is None else {NEGATIVE + "text": empty})

    def forward(
        self, latents: Tensor, sigma: Tensor, conditions: Conditions, guidance: float
    ) -> Tensor:
        return self.run(latents, _timestep(sigma), conditions)

    def decode_latents(self, latents: Tensor) -> Tensor:
        vae = self.pipeline.vae
        video: Tensor = vae.decode(standardised(latents, vae), return_dict=False)[0]
        return video.transpose(1, 2)


class WanFromImage(Wan):
    def encode_prompt(self, prompt: str, *, negative: str | None) -> Conditions:
        # As the pipeline's own, which fails where the package ftfy is not installed.
        from diffusers import WanPipeline

        text, *empty = (
            WanPipeline._get_t5_prompt_embeds(
                self.pipeline, each, max_sequence_length=self.text_tokens
            )
            for each in (prompt, negative)
            if each is not None
        )
        return {"text": text} | ({NEGATIVE + "text": empty[0]} if empty else {})

    def encode_edit(
        self, prompt: str, image: Tensor, *, negative: str | None, frames: int
    ) -> Conditions:
        conditions = {
            **self.encode_prompt(prompt, negative=negative),
            IMAGE: self._first_frame(image, frames).to(self.dtype),
        }
        if self.config.image_dim is not None:
            embedding = self.pipeline.encode_image(as_picture(image), self.device)
            conditions[IMAGE_EMBEDDING] = embedding.to(self.dtype)
        return conditions

    def _first_frame(self, image: Tensor, frames: int) -> Tensor:
        """Returns (1, mask + C, F, h, w): the latents of a video whose other frames are gray, and
        before them 1 in each frame of pixels that is the image's, and 0 elsewhere."""
        vae = self.pipeline.vae
        first = in_model_space(image).unsqueeze(2)
        others = first.new_zeros(*first.shape[:2], frames - 1, *first.shape[3:])
        video = torch.cat([first, others], dim=2).to(vae.dtype)
        latents = normalised(vae.encode(video).latent_dist.mode(), vae)
        per_latent = vae.config.scale_factor_temporal
        mask = latents.new_zeros(1, per_latent, *latents.shape[2:])
        mask[:, :, 0] = 1
        return torch.cat([mask, latents], dim=1)

    def forward(
        self, latents: Tensor, sigma: Tensor, conditions: Conditions, guidance: float
    ) -> Tensor:
        network_input = torch.cat([latents, conditions[IMAGE].to(latents.dtype)], dim=1)
        inputs = {}
        if IMAGE_EMBEDDING in conditions:
            inputs["encoder_hidden_states_image"] = conditions[IMAGE_EMBEDDING].to(self.dtype)
            # The pipeline's texts are that long, with zeros at the end.
            missing = NETWORK_TEXT - conditions["text"].shape[1]
            text = nn.functional.pad(conditions["text"], (0, 0, 0, missing))
            conditions = {**conditions, "text": text}
        return self.run(network_input, _timestep(sigma), conditions, **inputs)


def _timestep(sigma: Tensor) -> Tensor:
    return sigma * TRAIN_TIMESTEPS
