"""Small random networks in the folders that real weights come in, and images to score."""

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image
from torch import nn

from bench.digits.text import clip_tokenizer
from services.reward.scorer import WeightedScorer, build_scorers
from shared.recipe.rewards import ScorerTable

SIDE, PATCH, WIDTH = 16, 4, 24
BLIP_WIDTH = 128
PROMPTS = ["a handwritten five", "a written one", "two", "a red square on a blue field"]
MEAN = np.array([0.48145466, 0.4578275, 0.40821073])
DEVIATION = np.array([0.26862954, 0.26130258, 0.27577711])
"""Of the three channels, by which CLIP and BLIP take images."""

Images = npt.NDArray[np.uint8]


def images(num: int, height: int = 24, width: int = 24, *, channels: int = 3) -> Images:
    """Blocks of colour, so that resizing leaves something of them."""
    rng = np.random.default_rng(num + 100 * height + width)
    coarse = rng.integers(0, 256, (num, channels, -(-height // 8), -(-width // 8)), dtype=np.uint8)
    return coarse.repeat(8, axis=2).repeat(8, axis=3)[:, :, :height, :width].copy()


def metadata(num: int) -> list[dict[str, object]]:
    return [{"prompt": PROMPTS[index % len(PROMPTS)]} for index in range(num)]


def scorer(kind: str, folder: Path) -> WeightedScorer:
    [built] = build_scorers([ScorerTable(name="x", type=kind, folder=folder)])
    return built


def pixels(image: Images) -> torch.Tensor:
    """(1, 3, 16, 16) of a square image (3, H, W), as the papers say: bicubic, then normalised."""
    small = Image.fromarray(image.transpose(1, 2, 0)).resize((SIDE, SIDE), Image.Resampling.BICUBIC)
    scaled = (np.asarray(small) / 255 - MEAN) / DEVIATION
    return torch.tensor(scaled.transpose(2, 0, 1)[None], dtype=torch.float32)


@torch.no_grad()
def shaken(network: Any, seed: int) -> Any:
    """Random weights that keep a unit's scale, so that the scores depend on what is scored."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in network.named_parameters():
        if parameter.ndim >= 2:
            parameter.normal_(0, parameter[0].numel() ** -0.5, generator=generator)
        elif parameter.ndim == 1:
            parameter.normal_(float(name.endswith("weight")), 0.1, generator=generator)
    return network.requires_grad_(False).eval()


def save_clip(folder: Path, *, act: str = "quick_gelu", seed: int = 0) -> Path:
    from transformers import CLIPConfig, CLIPModel

    tokenizer = clip_tokenizer(77)
    layers = {
        "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": 2, "hidden_act": act,
    }  # fmt: skip
    text = {
        **layers, "vocab_size": len(tokenizer), "max_position_embeddings": 77,
        "bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }  # fmt: skip
    vision = {**layers, "image_size": SIDE, "patch_size": PATCH}
    model = CLIPModel(CLIPConfig(text_config=text, vision_config=vision, projection_dim=WIDTH))
    shaken(model, seed).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    save_processor(folder)
    return folder


def save_processor(folder: Path) -> None:
    from transformers import CLIPImageProcessor

    size = {"height": SIDE, "width": SIDE}
    CLIPImageProcessor(size={"shortest_edge": SIDE}, crop_size=size).save_pretrained(folder)


def blip_config() -> Any:
    from transformers import BlipConfig

    layers = {
        "hidden_size": BLIP_WIDTH, "intermediate_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": 2,
    }  # fmt: skip
    vision = {**layers, "image_size": SIDE, "patch_size": PATCH, "layer_norm_eps": 1e-6}
    text = {**layers, "vocab_size": len(bert_tokenizer()), "max_position_embeddings": 64}
    return BlipConfig(text_config=text, vision_config=vision)


def bert_tokenizer() -> Any:
    """A token for every letter."""
    from transformers import BertTokenizer

    letters = [chr(code) for code in range(ord("a"), ord("z") + 1)]
    tokens = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    tokens += [*letters, *(f"##{letter}" for letter in letters)]
    return BertTokenizer(vocab={token: index for index, token in enumerate(tokens)})


def head(width: int, seed: int) -> nn.Sequential:
    """Make linear layers with dropout between them, named as in both published heads."""
    layers = nn.Sequential(
        nn.Linear(width, 12), nn.Dropout(0.2), nn.Linear(12, 8), nn.Dropout(0.2),
        nn.Linear(8, 6), nn.Dropout(0.1), nn.Linear(6, 4), nn.Linear(4, 1),
    )  # fmt: skip
    made: nn.Sequential = shaken(layers, seed)
    return made
