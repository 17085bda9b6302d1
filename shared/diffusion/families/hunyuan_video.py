"""HunyuanVideo: text-to-video, masked text, guidance as an input of the network."""

from torch import Tensor

from shared.diffusion.families.base import Family
from shared.diffusion.models import Conditions


class HunyuanVideo(Family):
    @property
    def lora_excluded(self) -> tuple[str, ...]:
        return ("context_embedder",)  # its refiner of text tokens has layers of the same names

    def encode_prompt(self, prompt: str, *, negative: bool) -> Conditions:
        text, pooled, mask = self.pipeline.encode_prompt(
            prompt, prompt, max_sequence_length=self.text_tokens
        )
        return {"text": text, "pooled": pooled, "mask": mask}

    def forward(
        self, latents: Tensor, sigma: Tensor, conditions: Conditions, guidance: float
    ) -> Tensor:
        embeds = self.config.guidance_embeds
        return self.run(
            latents,
            sigma * 1000,
            conditions,
            encoder_attention_mask=conditions["mask"].to(self.dtype),
            guidance=sigma.new_full(sigma.shape, guidance * 1000) if embeds else None,
        )

    def decode_latents(self, latents: Tensor) -> Tensor:
        vae = self.pipeline.vae
        video: Tensor = vae.decode(latents / vae.config.scaling_factor, return_dict=False)[0]
        return video.transpose(1, 2)
