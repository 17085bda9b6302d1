"""Objects, counts, colours and positions, as a detector sees them: OWLv2 finds what a text names.

The folder is what transformers saves of an ``Owlv2ForObjectDetection`` with its processor:
``config.json``, ``*.safetensors``, the tokenizer's files and ``preprocessor_config.json``.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from PIL import Image
from torch import Tensor

from services.reward.object_checks import (
    COLOURS,
    DetectedObject,
    Requirements,
    parse_requirements,
    share_met,
)
from services.reward.scorer import Media, Metadata
from services.reward.scorers.inputs import rgb
from services.reward.scorers.pretrained import load_image_processor, load_network, load_tokenizer

PASS_IMAGES = 8
"""Images in one forward pass."""
THRESHOLD = 0.2
"""Least score of an object. Ours, as is the next: published figures used another detector."""
SAME_BOX = 0.5
"""Overlap, over the union, from which two boxes of a class are one object."""


class Detector(Protocol):
    def find(
        self, pictures: Sequence[Image.Image], wanted: Requirements
    ) -> list[list[DetectedObject]]:
        """Returns the objects of each picture, of the classes that are named."""


class Objects:
    """Scores the share of the conditions in a prompt's metadata that an image meets."""

    def __init__(self, folder: Path) -> None:
        """Raises UserError if the folder does not hold such a network."""
        self._detector: Detector = OwlDetector(folder)

    def score(self, images: Media, metadata: Metadata) -> list[float]:
        wanted = [parse_requirements(each) for each in metadata]
        scores = [0.0] * len(wanted)
        for each in dict.fromkeys(wanted):  # siblings share their prompt
            rows = [row for row, other in enumerate(wanted) if other == each]
            for first in range(0, len(rows), PASS_IMAGES):
                some = rows[first : first + PASS_IMAGES]
                objects_of_images = self._detector.find([rgb(images[row]) for row in some], each)
                for row, objects in zip(some, objects_of_images, strict=True):
                    scores[row] = share_met(each, objects)
        return scores


class OwlDetector:
    """OWLv2, by texts such as "a photo of a cat"."""

    def __init__(self, folder: Path) -> None:
        from transformers import Owlv2ForObjectDetection

        self._model = load_network(Owlv2ForObjectDetection, folder)
        self._tokenizer = load_tokenizer(folder)
        self._processor = load_image_processor(folder)

    @torch.inference_mode()
    def find(
        self, pictures: Sequence[Image.Image], wanted: Requirements
    ) -> list[list[DetectedObject]]:
        names = list(dict.fromkeys(each.name for each in (*wanted.include, *wanted.exclude)))
        coloured = list(dict.fromkeys(each.name for each in wanted.include if each.color))
        texts = [f"a photo of a {name}" for name in names]
        texts += [f"a photo of a {colour} {name}" for name in coloured for colour in COLOURS]
        tokens = self._tokens(texts)
        pixels = self._processor(images=list(pictures), return_tensors="pt")["pixel_values"]
        output = self._model(
            pixel_values=pixels.to(self._model.device),
            input_ids=tokens["input_ids"].repeat(len(pictures), 1),
            attention_mask=tokens["attention_mask"].repeat(len(pictures), 1),
        )
        return [
            list(_objects(names, coloured, logits, _in_pixels(boxes, picture)))
            for picture, logits, boxes in zip(
                pictures, output.logits.float().cpu(), output.pred_boxes.float().cpu(), strict=True
            )
        ]

    def _tokens(self, texts: Sequence[str]) -> Any:
        longest = self._model.config.text_config.max_position_embeddings
        return self._tokenizer(
            list(texts), padding="max_length", truncation=True, max_length=longest,
            return_tensors="pt",
        ).to(self._model.device)  # fmt: skip


def _in_pixels(boxes: Tensor, picture: Image.Image) -> Tensor:
    """Boxes (n, 4), middle and size in shares of the square that a picture is padded to at its
    right or lower end, as left, top, right, bottom in pixels."""
    middle, half = boxes[:, :2], boxes[:, 2:] / 2
    return torch.cat([middle - half, middle + half], dim=1) * max(picture.size)


def _objects(
    names: Sequence[str], coloured: Sequence[str], logits: Tensor, boxes: Tensor
) -> Iterator[DetectedObject]:
    """Yields the objects of one picture.

    Args:
        logits: (n, queries), of the names and then of each coloured name in each colour.
        boxes: (n, 4).
    """
    for number, name in enumerate(names):
        scores = logits[:, number].sigmoid()
        for row in _distinct(scores, boxes):
            colour = None
            if name in coloured:
                first = len(names) + coloured.index(name) * len(COLOURS)
                colour = COLOURS[int(logits[row, first : first + len(COLOURS)].argmax())]
            left, top, right, bottom = boxes[row].tolist()
            yield DetectedObject(name, float(scores[row]), (left, top, right, bottom), colour)


def _distinct(scores: Tensor, boxes: Tensor) -> list[int]:
    """Returns the rows of objects, the surest first: of boxes that overlap, the surest alone."""
    kept: list[int] = []
    for row in scores.argsort(descending=True).tolist():
        if scores[row] < THRESHOLD:
            break
        if all(_overlap(boxes[row], boxes[other]) < SAME_BOX for other in kept):
            kept.append(row)
    return kept


def _overlap(one: Tensor, other: Tensor) -> float:
    low, high = torch.maximum(one[:2], other[:2]), torch.minimum(one[2:], other[2:])
    both = float((high - low).clamp(min=0).prod())
    areas = [float((each[2:] - each[:2]).clamp(min=0).prod()) for each in (one, other)]
    union = sum(areas) - both
    return both / union if union > 0 else 0.0
