"""Z-Image: text-to-image, texts and images as lists of samples, classifier-free guidance."""

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from shared.diffusion.families.base import NEGATIVE, Family, at_least_float32
from shared.diffusion.loading.models import Conditions
from shared.models.sigmas import TRAIN_TIMESTEPS

_MULTIPLE = 32
"""The network pads every text to a multiple of this number of tokens."""


class ZImage(Family):
    pads_text: ClassVar[bool] = False

    @property
    def lora_excluded(self) -> tuple[str, ...]:
        # The refiners of image and text have layers of the same names.
        return ("noise_refiner", "context_refiner")

    def encode_prompt(self, prompt: str, *, negative: str | None) -> Conditions:
        text, empty = self.pipeline.encode_prompt(
            prompt,
            negative_prompt=negative,
            do_classifier_free_guidance=negative is not None,
            max_sequence_length=self.text_tokens,
        )
        texts = {"text": text[0], **({NEGATIVE + "text": empty[0]} if empty else {})}
        return {name: each.unsqueeze(0) for name, each in texts.items()}

    def both(
        self, latents: Tensor, sigma: Tensor, empty: Conditions, prompt: Conditions, guidance: float
    ) -> tuple[Tensor, Tensor]:
        """Runs both halves as one batch, as the pipeline does, where the network pads their texts
        to one length; of another length it would mask the shorter ones."""
        is_split = self.cfg_gradient == "conditional" and torch.is_grad_enabled()
        if is_split or _padded(empty) != _padded(prompt):
            return super().both(latents, sigma, empty, prompt, guidance)
        velocities = self._run(
            torch.cat([latents, latents]),
            torch.cat([sigma, sigma]),
            [*prompt["text"].unbind(0), *empty["text"].unbind(0)],
        )
        conditional, unconditional = at_least_float32(velocities).chunk(2)
        return unconditional, conditional

    def forward(
        self, latents: Tensor, sigma: Tensor, conditions: Conditions, guidance: float
    ) -> Tensor:
        return self._run(latents, sigma, conditions["text"].unbind(0))

    def guided(
        self, unconditional: Tensor, conditional: Tensor, guidance: float | Tensor
    ) -> Tensor:
        return conditional + (guidance - 1) * (conditional - unconditional)

    def _run(self, latents: Tensor, sigma: Tensor, texts: Sequence[Tensor]) -> Tensor:
        """Returns velocities (B, C, h, w) for B texts (L, width), whose lengths may differ."""
        # As the pipeline rounds it: the network takes sines of 1000 times this.
        time = (TRAIN_TIMESTEPS - sigma * TRAIN_TIMESTEPS) / TRAIN_TIMESTEPS
        velocities: list[Tensor] = self.transformer(
            list(latents.to(self.dtype).unsqueeze(2).unbind(0)),
            time,
            [text.to(self.dtype) for text in texts],
            return_dict=False,
        )[0]
        return -torch.stack(velocities).squeeze(2)


def _padded(conditions: Conditions) -> int:
    return -(-conditions["text"].shape[1] // _MULTIPLE)
