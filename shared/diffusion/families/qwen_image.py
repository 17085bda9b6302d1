"""Qwen-Image: text-to-image, tokens of 2 x 2 latents, rescaled guidance."""

from torch import Tensor

from shared.diffusion.families.base import NEGATIVE, Family, pack, standardised, unpack
from shared.diffusion.models import Conditions


class QwenImage(Family):
    @property
    def lora_excluded(self) -> tuple[str, ...]:
        # What the last block makes of the text is not used: it never has a gradient.
        last = f"transformer_blocks.{self.config.num_layers - 1}"
        return tuple(
            f"{last}.{layer}" for layer in ("attn.add_q_proj", "attn.to_add_out", "txt_mlp")
        )

    def encode_prompt(self, prompt: str, *, negative: bool) -> Conditions:
        text = {"text": self._text(prompt)}
        return {**text, NEGATIVE + "text": self._text("")} if negative else text

    def forward(
        self, latents: Tensor, sigma: Tensor, conditions: Conditions, guidance: float
    ) -> Tensor:
        rows, _, height, width = latents.shape
        tokens = self.run(
            pack(latents),
            sigma,
            conditions,
            img_shapes=[[(1, height // 2, width // 2)]] * rows,
        )
        return unpack(tokens, height, width)

    def guided(
        self, unconditional: Tensor, conditional: Tensor, guidance: float | Tensor
    ) -> Tensor:
        """Scales every token to the length that it has with the prompt alone: (B, C, h, w)."""
        height, width = conditional.shape[-2:]
        alone = pack(conditional)
        both = pack(super().guided(unconditional, conditional, guidance))
        scale = alone.norm(dim=-1, keepdim=True) / both.norm(dim=-1, keepdim=True)
        return unpack(both * scale, height, width)

    def decode_latents(self, latents: Tensor) -> Tensor:
        vae = self.pipeline.vae
        video: Tensor = vae.decode(standardised(latents.unsqueeze(2), vae), return_dict=False)[0]
        return video[:, :, 0]

    def _text(self, prompt: str) -> Tensor:
        """Encodes a prompt to (1, L, width), without padding."""
        text: Tensor = self.pipeline.encode_prompt(prompt, max_sequence_length=self.text_tokens)[0]
        return text
