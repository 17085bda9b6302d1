"""ImageReward (Xu et al. 2023, arXiv:2304.05977): which of a prompt's images people rank higher.

BLIP's text encoder reads the prompt and looks at the image through cross-attention; a head of
linear layers turns its first token into a number. Minus the mean and over the deviation that the
authors measured, so that it is about 0 with a spread of 1: between -2.5 and 2.

The folder, all under transformers' names:

    config.json                a BlipConfig: of ViT-L/16 at 224 pixels, and of the text encoder
    model.safetensors          vision_model.*, text_encoder.* (as in BlipForImageTextRetrieval),
                               and the head, mlp.layers.N.{weight,bias}
    preprocessor_config.json   a CLIPImageProcessor: the middle square at 224 pixels
    tokenizer files            tokenizer of bert-base-uncased, with BLIP's two additional tokens
"""

from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from services.reward.scorer import Media, Metadata
from services.reward.scorers.inputs import prompts, rgb
from services.reward.scorers.pretrained import (
    as_folder_error,
    freeze,
    linear_head,
    load_image_processor,
    load_tensors,
    load_tokenizer,
)

MEAN, DEVIATION = 0.16717362830052426, 1.0333394966054072
"""Mean and deviation of the head's numbers on the authors' images."""
MAX_TOKENS = 35
PASS_IMAGES = 16
WEIGHTS = "model.safetensors"


class ImageReward:
    def __init__(self, folder: Path) -> None:
        """Loads the networks; raises UserError if the folder does not hold them."""
        from transformers import BlipConfig, BlipTextModel, BlipVisionModel

        with as_folder_error(folder):
            config = BlipConfig.from_pretrained(folder, local_files_only=True)
            self._vision = BlipVisionModel(config.vision_config)
            self._text = BlipTextModel(config.text_config, add_pooling_layer=False)
            tensors = load_file(folder / WEIGHTS)
        load_tensors(self._vision, _part(tensors, "vision_model."), folder)
        load_tensors(self._text, _part(tensors, "text_encoder."), folder)
        for network in (self._vision, self._text):
            freeze(network)
        width = config.text_config.hidden_size
        self._head = linear_head(_part(tensors, "mlp."), width, folder)
        self._tokenizer = load_tokenizer(folder)
        self._processor = load_image_processor(folder)

    @torch.inference_mode()
    def score(self, images: Media, metadata: Metadata) -> list[float]:
        """Returns scores, most of them from -2.5 to 2.

        Raises:
            ValueError: if an image has no prompt.
        """
        texts, scores = prompts(metadata), list[float]()
        for first in range(0, len(images), PASS_IMAGES):
            some = slice(first, first + PASS_IMAGES)
            numbers = self._head(self._first_tokens(images[some], texts[some]))[:, 0]
            scores += ((numbers - MEAN) / DEVIATION).tolist()
        return scores

    def _first_tokens(self, images: Media, texts: list[str]) -> Tensor:
        """Returns (n, width): the text encoder's first token for each prompt and its image."""
        device = self._vision.device
        pictures = [rgb(image) for image in images]
        pixels = self._processor(images=pictures, return_tensors="pt")["pixel_values"]
        tokens = self._tokenizer(
            texts, padding=True, truncation=True, max_length=MAX_TOKENS, return_tensors="pt"
        ).to(device)
        features = self._vision(pixel_values=pixels.to(device)).last_hidden_state
        read: Tensor = self._text(
            input_ids=tokens["input_ids"],
            attention_mask=tokens["attention_mask"],
            encoder_hidden_states=features,
        ).last_hidden_state
        return read[:, 0]


def _part(tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """Returns the tensors whose names begin with ``prefix``, without it."""
    return {
        name.removeprefix(prefix): tensor
        for name, tensor in tensors.items()
        if name.startswith(prefix)
    }
