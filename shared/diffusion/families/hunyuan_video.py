"""HunyuanVideo: text-to-video, guidance as an input of the network."""

from torch import Tensor, nn

from shared.diffusion.families.base import Family
from shared.diffusion.loading.models import Conditions, without_masks


class HunyuanVideo(Family):
    @staticmethod
    def prepare(network: nn.Module) -> nn.Module:
        """Remove the mask from every attention, so that torch can use flash attention.

        Prompts are not padded, so all elements of the mask are 1."""
        for name, module in network.named_modules():
            if name.endswith(".attn"):
                module.register_forward_pre_hook(
                    lambda _, positional, named: (positional, {**named, "attention_mask": None}),
                    with_kwargs=True,
                )
        return network

    @property
    def lora_excluded(self) -> tuple[str, ...]:
        return ("context_embedder",)  # the token refiner has layers with the names of LoRA targets

    def encode_prompt(self, prompt: str, *, negative: str | None) -> Conditions:
        text, pooled, mask = self.pipeline.encode_prompt(
            prompt, prompt, max_sequence_length=self.text_tokens
        )
        return without_masks({"text": text, "pooled": pooled, "mask": mask})

    def forward(
        self, latents: Tensor, sigma: Tensor, conditions: Conditions, guidance: float
    ) -> Tensor:
        embeds, text = self.config.guidance_embeds, conditions["text"]
        return self.run(
            latents,
            sigma * 1000,
            conditions,
            encoder_attention_mask=text.new_ones(text.shape[:2], dtype=self.dtype),
            guidance=sigma.new_full(sigma.shape, guidance * 1000) if embeds else None,
        )

    def decode_latents(self, latents: Tensor) -> Tensor:
        vae = self.pipeline.vae
        video: Tensor = vae.decode(latents / vae.config.scaling_factor, return_dict=False)[0]
        return video.transpose(1, 2)
