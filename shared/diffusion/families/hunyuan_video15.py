"""HunyuanVideo-1.5: text-to-video, classifier-free guidance, quoted texts encoded by letters."""

from functools import wraps
from types import MethodType, SimpleNamespace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from shared.diffusion.families.base import NEGATIVE, Family
from shared.diffusion.loading.models import Conditions, without_masks
from shared.errors import UserError
from shared.models.sigmas import TRAIN_TIMESTEPS

_GUIDER = {
    "enabled": True, "guidance_rescale": 0.0, "start": 0.0, "stop": 1.0,
    "use_original_formulation": False,
}  # fmt: skip
"""Settings of the pipeline's guider that mean plain classifier-free guidance."""


class HunyuanVideo15(Family):
    """Texts have no padding here, and the tokens of an image, which a text-to-video model masks,
    are left out: then no attention needs a mask."""

    pads_text: ClassVar[bool] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        guider = getattr(self.pipeline, "guider", None)
        if guider is not None and (other := _settings(guider)):
            raise UserError(
                f"model.folder: its guider has {', '.join(other)}, which the adapter does not "
                "know; choose a model with plain classifier-free guidance"
            )

    @classmethod
    def class_named(cls, name: str) -> Any:
        pipeline_class = super().class_named(name)
        return (
            _without_decoder(pipeline_class) if name == "HunyuanVideo15Pipeline" else pipeline_class
        )

    @staticmethod
    def prepare(network: nn.Module) -> nn.Module:
        """Replaces the forward pass by one without masks: with them, torch takes no flash
        attention, and how many tokens there are is read from the device."""
        from diffusers.models.transformers.transformer_hunyuan_video import (
            HunyuanVideoAttnProcessor2_0,
        )

        network.forward = MethodType(_forward, network)
        blocks: Any = network.transformer_blocks
        for block in blocks:
            block.attn.set_processor(HunyuanVideoAttnProcessor2_0())
        return network

    @property
    def lora_excluded(self) -> tuple[str, ...]:
        # The refiner of text tokens has layers of the same names, and what the last block makes of
        # the text is not used: it never has a gradient. Nor has that block's add_q_proj, which
        # stays adapted: in ComfyUI's checkpoint it is one layer with two that have.
        last = self.config.num_layers - 1
        return ("context_embedder", f"transformer_blocks.{last}.attn.to_add_out")

    def encode_prompt(self, prompt: str, *, negative: str | None) -> Conditions:
        embeddings = self._texts(prompt)
        empty = {} if negative is None else self._texts(negative)
        return embeddings | {NEGATIVE + name: each for name, each in empty.items()}

    def forward(
        self, latents: Tensor, sigma: Tensor, conditions: Conditions, guidance: float
    ) -> Tensor:
        rows, channels, *size = latents.shape
        no_image = latents.new_zeros(rows, channels + 1, *size)  # its latents, and where they are
        glyphs = conditions.get("glyph_text")
        return self.run(
            torch.cat([latents, no_image], dim=1),
            sigma * TRAIN_TIMESTEPS,
            conditions,
            encoder_hidden_states_2=None if glyphs is None else glyphs.to(self.dtype),
        )

    def decode_latents(self, latents: Tensor) -> Tensor:
        vae = self.pipeline.vae
        videos = [  # one by one: the decoder's mask of earlier frames is for one
            vae.decode(each / vae.config.scaling_factor, return_dict=False)[0]
            for each in latents.split(1)
        ]
        return torch.cat(videos).transpose(1, 2)

    def _texts(self, prompt: str) -> Conditions:
        """Encodes a prompt to (1, L, width), and what it has in quotes, if anything, to
        (1, G, width of ByT5)."""
        self.pipeline.tokenizer_max_length = self.text_tokens
        text, mask, glyphs, glyph_mask = self.pipeline.encode_prompt(prompt)
        quoted = {"glyph_text": glyphs, "glyph_mask": glyph_mask} if glyph_mask.any() else {}
        return without_masks({"text": text, "mask": mask, **quoted})


def _without_decoder(pipeline: Any) -> Any:
    """Returns the class of a pipeline that may be loaded without its decoder, which diffusers'
    class asks for its number of channels."""

    class Pipeline(pipeline):  # type: ignore[misc]
        @wraps(pipeline.__init__)  # type: ignore[misc]
        def __init__(self, **parts: Any) -> None:
            super().__init__(**{**parts, "vae": parts["vae"] or _NoDecoder()})
            self.vae = parts["vae"]

    return Pipeline


class _NoDecoder:
    """The decoder attributes that the pipeline's class reads; their values are not used."""

    temporal_compression_ratio, spatial_compression_ratio = 4, 16
    config = SimpleNamespace(latent_channels=32)


def _settings(guider: Any) -> list[str]:
    """Returns what a guider does besides classifier-free guidance."""
    kind, config = type(guider).__name__, guider.config
    return [
        *([] if kind == "ClassifierFreeGuidance" else [f"the class {kind}"]),
        *(
            f"{key} = {config.get(key)}"
            for key, plain in _GUIDER.items()
            if config.get(key) != plain
        ),
    ]


def _forward(
    self: Any,
    hidden_states: Tensor,
    timestep: Tensor,
    encoder_hidden_states: Tensor,
    encoder_hidden_states_2: Tensor | None,
    return_dict: bool = False,
) -> tuple[Tensor]:
    """Runs the network as diffusers does, on texts (B, L, ...) and, if any, (B, G, ...) without
    padding."""
    rows, _, frames, height, width = hidden_states.shape
    patch = (self.config.patch_size_t, self.config.patch_size, self.config.patch_size)
    tokens = [
        size // patch_size for size, patch_size in zip((frames, height, width), patch, strict=True)
    ]
    rotation = self.rope(hidden_states)
    time = self.time_embed.time_proj(timestep).to(hidden_states.dtype)
    time = self.time_embed.timestep_embedder(time)
    hidden_states = self.x_embedder(hidden_states)
    kinds = self.cond_type_embed.weight
    text = self.context_embedder(encoder_hidden_states, timestep) + kinds[0]
    if encoder_hidden_states_2 is not None:
        glyphs = self.context_embedder_2(encoder_hidden_states_2) + kinds[1]
        text = torch.cat([glyphs, text], dim=1)
    is_checkpointed = torch.is_grad_enabled() and self.gradient_checkpointing
    for block in self.transformer_blocks:
        inputs = (hidden_states, text, time, None, rotation)
        hidden_states, text = (
            self._gradient_checkpointing_func(block, *inputs) if is_checkpointed else block(*inputs)
        )
    output = self.proj_out(self.norm_out(hidden_states, time))
    output = output.reshape(rows, *tokens, -1, *patch).permute(0, 4, 1, 5, 2, 6, 3, 7)
    return (output.reshape(rows, -1, frames, height, width),)
