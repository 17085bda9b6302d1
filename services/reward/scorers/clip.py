"""CLIP: images and texts as vectors of one space, and the scorers that compare them.

The folder is what transformers saves of a ``CLIPModel`` with its processor: ``config.json``,
``*.safetensors``, the tokenizer's files and ``preprocessor_config.json``.
"""

from collections.abc import Sequence
from pathlib import Path

import torch
from PIL import Image, ImageOps
from torch import Tensor

from services.reward.scorer import Media, Metadata
from services.reward.scorers.inputs import prompts, rgb
from services.reward.scorers.pretrained import load_image_processor, load_network, load_tokenizer

PASS_IMAGES = 32
"""Images or texts in one forward pass: the number that fits together with CLIP-H in 8 GB."""


class Clip:
    def __init__(self, folder: Path, *, padded: bool = False) -> None:
        """``padded``: images that are not square get black margins and lose nothing; otherwise the
        folder's image processor decides (it crops the middle).

        Raises:
            UserError: if the folder does not hold such a network.
        """
        from transformers import CLIPModel

        self._model = load_network(CLIPModel, folder)
        self._tokenizer = load_tokenizer(folder)
        self._processor = load_image_processor(folder)
        self._padded = padded

    @property
    def width(self) -> int:
        """Length of the vectors."""
        return int(self._model.config.projection_dim)

    @property
    def scale(self) -> float:
        """Factor of a cosine that the network has learned: its temperature, inverted."""
        return float(self._model.logit_scale.exp())

    def cosines(self, images: Media, metadata: Metadata) -> list[float]:
        """Returns the cosine of each image and its prompt, from -1 to 1.

        Raises:
            ValueError: if an image has no prompt.
        """
        texts = prompts(metadata)
        distinct = list(dict.fromkeys(texts))  # siblings share their prompt
        of_text = dict(zip(distinct, self.text_vectors(distinct), strict=True))
        wanted = torch.stack([of_text[text] for text in texts])
        values: list[float] = (self.image_vectors(images) * wanted).sum(-1).tolist()
        return values

    @torch.inference_mode()
    def image_vectors(self, images: Media) -> Tensor:
        """Returns unit vectors (n, width) of images (n, C, H, W)."""
        parts = []
        for first in range(0, len(images), PASS_IMAGES):
            pixels = self._pixels([rgb(image) for image in images[first : first + PASS_IMAGES]])
            pooled = self._model.vision_model(pixel_values=pixels).pooler_output
            parts.append(self._model.visual_projection(pooled))
        return _unit(torch.cat(parts))

    @torch.inference_mode()
    def text_vectors(self, texts: Sequence[str]) -> Tensor:
        """Returns unit vectors (n, width) of n texts, which are cut off where the network's end."""
        longest = self._model.config.text_config.max_position_embeddings
        parts = []
        for first in range(0, len(texts), PASS_IMAGES):
            some = list(texts[first : first + PASS_IMAGES])
            tokens = self._tokenizer(
                some, padding=True, truncation=True, max_length=longest, return_tensors="pt"
            ).to(self._model.device)
            pooled = self._model.text_model(
                input_ids=tokens["input_ids"], attention_mask=tokens["attention_mask"]
            ).pooler_output
            parts.append(self._model.text_projection(pooled))
        return _unit(torch.cat(parts))

    def _pixels(self, pictures: list[Image.Image]) -> Tensor:
        how: dict[str, bool] = {}
        if self._padded:
            side = self._model.config.vision_config.image_size
            pictures = [
                ImageOps.pad(each, (side, side), Image.Resampling.BICUBIC) for each in pictures
            ]
            how = {"do_resize": False, "do_center_crop": False}
        batch = self._processor(images=pictures, return_tensors="pt", **how)
        pixels: Tensor = batch["pixel_values"].to(self._model.device)
        return pixels


def _unit(vectors: Tensor) -> Tensor:
    unit: Tensor = vectors / vectors.norm(dim=-1, keepdim=True)
    return unit


class ClipScore:
    """CLIPScore (Hessel et al. 2021, arXiv:2104.08718): 2.5 times the cosine, from 0 to 2.5, and
    hardly ever above 1 with OpenAI's weights. The paper puts "A photo depicts" before a caption;
    here the prompt stands alone, as it names the kind of picture itself."""

    def __init__(self, folder: Path) -> None:
        self._clip = Clip(folder)

    def score(self, images: Media, metadata: Metadata) -> list[float]:
        return [2.5 * max(cosine, 0.0) for cosine in self._clip.cosines(images, metadata)]


class PickScore:
    """PickScore (Kirstain et al. 2023, arXiv:2305.01569): the logit of a CLIP-H that was trained on
    choices, over 26 as in Flow-GRPO. Typical images are between 0.7 and 0.9; no image reaches 4."""

    def __init__(self, folder: Path) -> None:
        self._clip = Clip(folder)

    def score(self, images: Media, metadata: Metadata) -> list[float]:
        factor = self._clip.scale / 26.0
        return [factor * cosine for cosine in self._clip.cosines(images, metadata)]


class HpsV2:
    """HPSv2 and HPSv2.1 (Wu et al. 2023, arXiv:2306.09341): the cosine of a CLIP-H that was trained
    on preferences, mostly 0.2 to 0.35; the paper prints a hundred times that. An image that is not
    square gets black margins, as in the published scorer."""

    def __init__(self, folder: Path) -> None:
        self._clip = Clip(folder, padded=True)

    def score(self, images: Media, metadata: Metadata) -> list[float]:
        return self._clip.cosines(images, metadata)
