"""Qwen2-VL with a head: the network of HPSv3 and of VideoAlign.

A question about an image or a video contains special tokens of the reward. A head maps the hidden
state at each special token to numbers. Position ids are plain sequence positions, also for image
tokens: the published code does not use Qwen2-VL's positions in time and space, and its weights were
trained without them.

`digenrl model reward` creates the folder:

    config.json, tokenizer files   network, with its dtype, and tokenizer of Qwen2-VL
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
from services.reward.scorers.pretrained import as_folder_error, freeze, load_network, load_tokenizer

ADAPTER = "adapter.safetensors"
TOKEN_PIXELS = 28
"""Height and width, in pixels, of the image area of one token."""
CHANNEL_MEAN = torch.tensor([0.48145466, 0.4578275, 0.40821073])[:, None, None]
CHANNEL_STD = torch.tensor([0.26862954, 0.26130258, 0.27577711])[:, None, None]
"""Normalisation of the three channels, (3, 1, 1)."""
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
            tokens: special tokens of the reward, in their order in a question.
        """
        from transformers import Qwen2VLModel

        self._model = load_network(Qwen2VLModel, folder, dtype="auto")
        self._tokenizer, self._media = load_tokenizer(folder), media
        self._tokenizer.add_tokens(list(tokens), special_tokens=True)
        token_ids = self._tokenizer.convert_tokens_to_ids([*tokens, f"<|{media}_pad|>"])
        self._reserved_ids = torch.tensor(token_ids, device=self._model.device)
        with as_folder_error(folder):
            self._head = {
                name: tensor.to(self._model.device)
                for name, tensor in load_file(folder / HEAD).items()
            }
            if (folder / ADAPTER).is_file():
                _add_adapters(self._model, load_file(folder / ADAPTER))

    @torch.inference_mode()
    def outputs(self, media: Sequence[Tensor], questions: Sequence[str]) -> Tensor:
        """Returns the outputs of the head at each special token: (samples, tokens, outputs).

        Args:
            media: frames (F, 3, H, W) from 0 to 255 of each sample. F is even; H and W are
                multiples of `TOKEN_PIXELS`. An image is two equal frames.

        Raises:
            ValueError: if a question contains further special tokens or image tokens.
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
        num_tokens = len(self._reserved_ids) - 1
        if torch.isin(ids, self._reserved_ids).sum(1).tolist() != [num_tokens + n for n in lengths]:
            raise ValueError("the prompt contains a token that is reserved for images or the head")
        pixels = "pixel_values" if self._media == "image" else "pixel_values_videos"
        inputs: dict[str, Any] = {
            pixels: torch.cat([_patches(each) for each in media]),
            f"{self._media}_grid_thw": grids,
            "attention_mask": rows["attention_mask"],
            "position_ids": torch.arange(ids.shape[1]).expand(3, *ids.shape),
        }
        inputs = {name: tensor.to(ids.device) for name, tensor in inputs.items()}
        states = self._model(input_ids=ids, use_cache=False, **inputs).last_hidden_state
        outputs: Tensor = states[torch.isin(ids, self._reserved_ids[:-1])].float()
        for layer in sorted({int(name.partition(".")[0]) for name in self._head}):
            weight, bias = self._head[f"{layer}.weight"], self._head.get(f"{layer}.bias")
            hidden = functional.relu(outputs) if layer else outputs
            outputs = functional.linear(hidden, weight, bias)
        return outputs.view(len(ids), num_tokens, -1)


def _patches(frames: Tensor) -> Tensor:
    """Returns patches of 2 frames and 14 x 14 pixels, flat; four adjacent ones form a token."""
    length, _, height, width = frames.shape
    cut = ((frames / 255 - CHANNEL_MEAN) / CHANNEL_STD).reshape(
        length // 2, 2, 3, height // TOKEN_PIXELS, 2, 14, width // TOKEN_PIXELS, 2, 14
    )
    return cut.permute(0, 3, 6, 4, 7, 2, 1, 5, 8).reshape(-1, 3 * 2 * 14 * 14)


def fit_size(height: int, width: int, min_pixels: int, max_pixels: int) -> tuple[int, int]:
    """Return the size to which Qwen2-VL scales a picture: sides are multiples of `TOKEN_PIXELS`.

    >>> fit_size(512, 512, 256 * 28 * 28, 256 * 28 * 28)
    (448, 448)
    """
    tokens = [max(1, round(each / TOKEN_PIXELS)) for each in (height, width)]
    if math.prod(tokens) * TOKEN_PIXELS**2 > max_pixels:
        scale = math.sqrt(max_pixels / (height * width))
        tokens = [max(1, math.floor(each * scale / TOKEN_PIXELS)) for each in (height, width)]
    elif math.prod(tokens) * TOKEN_PIXELS**2 < min_pixels:
        scale = math.sqrt(min_pixels / (height * width))
        tokens = [math.ceil(each * scale / TOKEN_PIXELS) for each in (height, width)]
    return tokens[0] * TOKEN_PIXELS, tokens[1] * TOKEN_PIXELS


class AdaptedLayer(nn.Module):
    """A layer and its LoRA, not merged: a merge in bfloat16 would lose most of the LoRA."""

    def __init__(self, layer: nn.Module, down: Tensor, up: Tensor) -> None:
        super().__init__()
        self.layer, self.down, self.up = layer, nn.Parameter(down), nn.Parameter(up)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.layer(x) + (x @ self.down.T) @ self.up.T
        return output


def _add_adapters(model: Any, tensors: dict[str, Tensor]) -> None:
    for name in {name.rpartition(".")[0] for name in tensors}:
        down, up = (tensors[f"{name}.{side}"].to(model.dtype) for side in ("down", "up"))
        model.set_submodule(name, AdaptedLayer(model.get_submodule(name), down, up))
    freeze(model)
