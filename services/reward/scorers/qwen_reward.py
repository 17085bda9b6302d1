"""Qwen2-VL with a head: the network of HPSv3 and of VideoAlign.

A question about an image or a video holds tokens of the reward's own; a head turns the network's
state at each of them into numbers. Positions count along the sequence, image tokens included: the
published code never computes Qwen2-VL's positions in time and space, and its weights were trained
without them.

The folder, as `digenrl model reward` makes it:

    config.json, tokenizer files   tokenizer of the Qwen2-VL, in the dtype of the network
    model.safetensors              `visual.*` and `language_model.*`
    head.safetensors               linear layers `N.weight` and `N.bias`, ReLU between them;
        float32
    adapter.safetensors            `LAYER.down` and `LAYER.up`, if a LoRA was published
"""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional

from services.reward.kinds import HEAD
from services.reward.scorers.pretrained import frozen, load_network, load_tokenizer, loading

ADAPTER = "adapter.safetensors"
SIDE = 28
"""Height and width of a token of an image in pixels."""
MEAN = torch.tensor([0.48145466, 0.4578275, 0.40821073])[:, None, None]
DEVIATION = torch.tensor([0.26862954, 0.26130258, 0.27577711])[:, None, None]
"""Normalisation of the three channels."""
CHAT = (
    "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n<|im_start|>user\n"
    "<|vision_start|>{}<|vision_end|>{}<|im_end|>\n<|im_start|>assistant\n"
)
"""Chat template of Qwen2-VL for an image or a video, followed by a text."""


class QwenReward:
    def __init__(
        self, folder: Path, tokens: Sequence[str], media: Literal["image", "video"]
    ) -> None:
        """Loads the network; raises UserError if the folder does not hold it.

        Args:
            tokens: the reward's own, in the order in which a question holds them.
        """
        from transformers import Qwen2VLModel

        self._model = load_network(Qwen2VLModel, folder, dtype="auto")
        self._tokenizer, self._media = load_tokenizer(folder), media
        self._tokenizer.add_tokens(list(tokens), special_tokens=True)
        numbers = self._tokenizer.convert_tokens_to_ids([*tokens, f"<|{media}_pad|>"])
        self._reserved = torch.tensor(numbers, device=self._model.device)
        with loading(folder):
            self._head = {
                name: tensor.to(self._model.device)
                for name, tensor in load_file(folder / HEAD).items()
            }
            if (folder / ADAPTER).is_file():
                _adapt(self._model, load_file(folder / ADAPTER))

    @torch.inference_mode()
    def numbers(self, media: Sequence[Tensor], questions: Sequence[str]) -> Tensor:
        """Returns what the head makes of each token: (n, tokens, numbers).

        Args:
            media: frames (F, 3, H, W) from 0 to 255 of each sample, F even and H and W multiples of
                `SIDE`; an image is two equal frames.

        Raises:
            ValueError: if a question holds further tokens of the reward, or of images.
        """
        grids = torch.tensor(
            [[len(each) // 2, *(n // 14 for n in each.shape[2:])] for each in media]
        )
        lengths = (grids.prod(1) // 4).tolist()
        texts = [
            CHAT.format(f"<|{self._media}_pad|>" * length, question)
            for length, question in zip(lengths, questions, strict=True)
        ]
        rows = self._tokenizer(texts, padding=True, padding_side="right", return_tensors="pt")
        ids = rows["input_ids"].to(self._model.device)
        num_tokens = len(self._reserved) - 1
        if torch.isin(ids, self._reserved).sum(1).tolist() != [num_tokens + n for n in lengths]:
            raise ValueError("the prompt holds a token that is reserved for images or for the head")
        pixels = "pixel_values" if self._media == "image" else "pixel_values_videos"
        seen: dict[str, Any] = {
            pixels: torch.cat([_patches(each) for each in media]),
            f"{self._media}_grid_thw": grids,
            "attention_mask": rows["attention_mask"],
            "position_ids": torch.arange(ids.shape[1]).expand(3, *ids.shape),
        }
        seen = {name: tensor.to(ids.device) for name, tensor in seen.items()}
        states = self._model(input_ids=ids, use_cache=False, **seen).last_hidden_state
        found: Tensor = states[torch.isin(ids, self._reserved[:-1])].float()
        for number in sorted({int(name.partition(".")[0]) for name in self._head}):
            weight, bias = self._head[f"{number}.weight"], self._head.get(f"{number}.bias")
            found = functional.linear(functional.relu(found) if number else found, weight, bias)
        return found.view(len(ids), num_tokens, -1)


def _patches(frames: Tensor) -> Tensor:
    """Returns patches of 14 by 14 pixels of two frames each, the four of a token together."""
    length, _, height, width = frames.shape
    cut = ((frames / 255 - MEAN) / DEVIATION).reshape(
        length // 2, 2, 3, height // SIDE, 2, 14, width // SIDE, 2, 14
    )
    return cut.permute(0, 3, 6, 4, 7, 2, 1, 5, 8).reshape(-1, 3 * 2 * 14 * 14)


def fitted(height: int, width: int, least: int, most: int) -> tuple[int, int]:
    """Return the size near a picture's with sides that are multiples of `SIDE`, within these limits
    on pixels, as Qwen2-VL does.

    >>> fitted(512, 512, 256 * 28 * 28, 256 * 28 * 28)
    (448, 448)
    """
    tokens = [max(1, round(each / SIDE)) for each in (height, width)]
    if math.prod(tokens) * SIDE**2 > most:
        scale = math.sqrt(most / (height * width))
        tokens = [max(1, math.floor(each * scale / SIDE)) for each in (height, width)]
    elif math.prod(tokens) * SIDE**2 < least:
        scale = math.sqrt(least / (height * width))
        tokens = [math.ceil(each * scale / SIDE) for each in (height, width)]
    return tokens[0] * SIDE, tokens[1] * SIDE


class AdaptedLayer(nn.Module):
    """A layer and its LoRA. They stay apart: most of a LoRA is lost in a sum of type bfloat16."""

    def __init__(self, layer: nn.Module, down: Tensor, up: Tensor) -> None:
        super().__init__()
        self.layer, self.down, self.up = layer, nn.Parameter(down), nn.Parameter(up)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.layer(x) + (x @ self.down.T) @ self.up.T
        return found


def _adapt(model: Any, tensors: dict[str, Tensor]) -> None:
    for name in {name.rpartition(".")[0] for name in tensors}:
        down, up = (tensors[f"{name}.{side}"].to(model.dtype) for side in ("down", "up"))
        model.set_submodule(name, AdaptedLayer(model.get_submodule(name), down, up))
    frozen(model)
