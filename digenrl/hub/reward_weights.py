"""Convert published weights of rewards into the folders that our scorers load.

Rewards are published as tensors under names of their own, most of them pickled: the names change,
the numbers do not. Only tensors are read from the pickles, never code.
"""

import json
import math
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from shared.errors import UserError

Tensors = dict[str, Tensor]
Names = tuple[tuple[str, str], ...]
"""Patterns and their replacements, applied one after the other."""

OPEN_CLIP: Names = (
    (r"^visual\.transformer\.resblocks\.", "vision_model.encoder.layers."),
    (r"^transformer\.resblocks\.", "text_model.encoder.layers."),
    (r"^visual\.class_embedding$", "vision_model.embeddings.class_embedding"),
    (r"^visual\.positional_embedding$", "vision_model.embeddings.position_embedding.weight"),
    (r"^visual\.conv1\.", "vision_model.embeddings.patch_embedding."),
    (r"^visual\.ln_pre\.", "vision_model.pre_layrnorm."),  # as transformers spells it
    (r"^visual\.ln_post\.", "vision_model.post_layernorm."),
    (r"^visual\.proj$", "visual_projection.weight"),
    (r"^text_projection$", "text_projection.weight"),
    (r"^token_embedding\.", "text_model.embeddings.token_embedding."),
    (r"^positional_embedding$", "text_model.embeddings.position_embedding.weight"),
    (r"^ln_final\.", "text_model.final_layer_norm."),
    (r"\.ln_(\d)\.", r".layer_norm\1."),
    (r"\.attn\.", ".self_attn."),
    (r"\.mlp\.c_fc\.", ".mlp.fc1."),
    (r"\.mlp\.c_proj\.", ".mlp.fc2."),
)
BLIP: Names = (
    (r"^blip\.text_encoder\.", "text_encoder."),
    (r"^blip\.visual_encoder\.blocks\.", "vision_model.encoder.layers."),
    (r"^blip\.visual_encoder\.norm\.", "vision_model.post_layernorm."),
    (r"^blip\.visual_encoder\.cls_token$", "vision_model.embeddings.class_embedding"),
    (r"^blip\.visual_encoder\.pos_embed$", "vision_model.embeddings.position_embedding"),
    (r"^blip\.visual_encoder\.patch_embed\.proj\.", "vision_model.embeddings.patch_embedding."),
    (r"\.norm(\d)\.", r".layer_norm\1."),
    (r"\.attn\.proj\.", ".self_attn.projection."),
    (r"\.attn\.qkv\.", ".self_attn.qkv."),
)
QWEN: Names = (
    (r"^base_model\.model\.", ""),
    (r"\.base_layer\.", "."),
    (r"^(model\.)?visual\.", "model.visual."),
    (r"^model\.(language_model\.)?(?!visual)", "model.language_model."),
    (r"^rm_head\.(?=[wb])", "rm_head.0."),
    (r"^rm_head\.", "head."),
    (r"^model\.(.*)\.lora_A\.default\.weight$", r"adapter.\1.down"),
    (r"^model\.(.*)\.lora_B\.default\.weight$", r"adapter.\1.up"),
)
"""To the name of a file, and a name in it."""
LORA_SCALE = 2.0
"""VideoAlign's alpha over its rank."""
BLIP_HEAD = 64
"""Width of an attention head in every part of BLIP."""


def make_folder(reward: str, weights: Path, like: Path, out: Path) -> None:
    """Write the folder ``out`` for the scorer ``reward``.

    Args:
        weights: the published file.
        like: a transformers folder from which everything else is copied: the reward's CLIP or
            Qwen2-VL, or for ImageReward a folder with the tokenizer of bert-base-uncased.

    Raises:
        UserError: if an argument is invalid.
    """
    if not like.is_dir():
        raise UserError(f"--like: no folder {like}")
    if out.exists():
        raise UserError(f"--out: {out} already exists; choose another folder")
    tensors = _read(weights)
    expected, write = REWARDS[reward]
    if expected not in tensors:
        raise UserError(f"WEIGHTS: {weights} has no {expected}; is it the file of {reward}?")
    if write is not _write_qwen:  # its network keeps its type, as it is large
        tensors = {name: tensor.float() for name, tensor in tensors.items()}
    write(tensors, like, out)


def clip_tensors(published: Mapping[str, Tensor]) -> Tensors:
    """Convert the tensors of a CLIP from open_clip's names to the names of ``CLIPModel``."""
    converted: Tensors = {}
    for name, tensor in published.items():
        new = _renamed(name, OPEN_CLIP)
        match = re.fullmatch(r"(.*\.)in_proj_(weight|bias)", new)
        if match is not None:  # queries, keys and values, stacked
            for part, rows in zip("qkv", tensor.chunk(3), strict=True):
                converted[f"{match[1]}{part}_proj.{match[2]}"] = rows.contiguous()
        elif name in ("visual.proj", "text_projection"):  # open_clip multiplies from the right
            converted[new] = tensor.T.contiguous()
        else:
            converted[new] = tensor
    return converted


def blip_tensors(published: Mapping[str, Tensor]) -> Tensors:
    """Convert ImageReward's tensors to what `services/reward/scorers/image_reward.py` loads."""
    parts = ("blip.visual_encoder.", "blip.text_encoder.", "mlp.")
    return {
        _renamed(name, BLIP): tensor.contiguous()
        for name, tensor in published.items()
        if name.startswith(parts) and not name.endswith(".position_ids")
    }


def blip_config(tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return the ``BlipConfig`` of a network, whose tensors have transformers' names."""
    pixels = "vision_model.embeddings."
    _, _, side, _ = tensors[f"{pixels}patch_embedding.weight"].shape
    _, positions, width = tensors[f"{pixels}position_embedding"].shape
    words, read = tensors["text_encoder.embeddings.word_embeddings.weight"].shape
    first = "text_encoder.encoder.layer.0."
    vision = {
        "hidden_size": width,
        "intermediate_size": len(tensors["vision_model.encoder.layers.0.mlp.fc1.bias"]),
        "num_hidden_layers": _count(tensors, r"vision_model\.encoder\.layers\.\d+\.mlp\.fc1\.bias"),
        "num_attention_heads": width // BLIP_HEAD,
        "image_size": math.isqrt(positions - 1) * side,
        "patch_size": side,
        "layer_norm_eps": 1e-6,  # as in the original; the default of transformers differs
    }
    text = {
        "vocab_size": words,
        "hidden_size": read,
        "encoder_hidden_size": width,
        "intermediate_size": len(tensors[f"{first}intermediate.dense.bias"]),
        "num_hidden_layers": _count(
            tensors, r"text_encoder\.encoder\.layer\.\d+\.intermediate\.dense\.bias"
        ),
        "num_attention_heads": read // BLIP_HEAD,
        "max_position_embeddings": len(
            tensors["text_encoder.embeddings.position_embeddings.weight"]
        ),
    }
    return {"model_type": "blip", "vision_config": vision, "text_config": text}


def _write_aesthetic(tensors: Tensors, like: Path, out: Path) -> None:
    shutil.copytree(like, out)
    save_file(tensors, out / "aesthetic.safetensors")


def _write_hpsv2(tensors: Tensors, like: Path, out: Path) -> None:
    _write_clip(clip_tensors(tensors), like, out)


def _write_clip(tensors: Tensors, like: Path, out: Path) -> None:
    _copy_all_but_weights(like, out)
    save_file(tensors, out / "model.safetensors", {"format": "pt"})


def _write_qwen(tensors: Tensors, like: Path, out: Path) -> None:
    """Write what `services/reward/scorers/qwen_reward.py` loads: the network, its head, and its
    adapter if there is one."""
    files: dict[str, Tensors] = {}
    for name, tensor in tensors.items():
        file, _, new = _renamed(name, QWEN).partition(".")
        files.setdefault(file, {})[new] = tensor * LORA_SCALE if new.endswith(".up") else tensor
    files.pop("lm_head", None)
    files["head"] = {name: tensor.float() for name, tensor in files["head"].items()}
    try:
        config = json.loads((like / "config.json").read_text())
    except (OSError, ValueError) as error:
        raise UserError(f"--like: cannot read config.json of a Qwen2-VL in {like}") from error
    words = len(files["model"]["language_model.embed_tokens.weight"])  # with those of the reward
    (config.get("text_config") or config)["vocab_size"] = words
    _copy_all_but_weights(like, out)
    (out / "config.json").write_text(json.dumps(config, indent=1))
    for name, part in files.items():
        save_file(part, out / f"{name}.safetensors", {"format": "pt"})


def _write_image_reward(tensors: Tensors, like: Path, out: Path) -> None:
    converted = blip_tensors(tensors)
    config = blip_config(converted)
    _copy_all_but_weights(like, out)
    side = config["vision_config"]["image_size"]
    processor = {
        "image_processor_type": "CLIPImageProcessor",
        "size": {"shortest_edge": side},
        "crop_size": {"height": side, "width": side},
    }
    (out / "processor_config.json").unlink(missing_ok=True)  # it would override the preprocessor
    (out / "preprocessor_config.json").write_text(json.dumps(processor, indent=1))
    (out / "config.json").write_text(json.dumps(config, indent=1))
    save_file(converted, out / "model.safetensors", {"format": "pt"})


REWARDS: Mapping[str, tuple[str, Callable[[Tensors, Path, Path], None]]] = {
    "aesthetic": ("layers.0.weight", _write_aesthetic),
    "hpsv2": ("visual.proj", _write_hpsv2),
    "hpsv3": ("rm_head.0.weight", _write_qwen),
    "image-reward": ("blip.visual_encoder.cls_token", _write_image_reward),
    "pick-score": ("visual_projection.weight", _write_clip),
    "video-align": ("base_model.model.rm_head.weight", _write_qwen),
}
"""By reward: a tensor that identifies its published weights, and what writes its folder."""


def _read(weights: Path) -> Tensors:
    try:
        if weights.suffix == ".safetensors":
            return dict(load_file(weights))
        read = torch.load(weights, map_location="cpu", weights_only=True)
    except Exception as error:  # a broken file raises whatever the unpickler stumbles over
        reason = " ".join(str(error).split())[:200]
        raise UserError(f"WEIGHTS: cannot read {weights}: {reason}") from error
    tensors = read.get("state_dict", read) if isinstance(read, Mapping) else {}
    if not tensors or not all(isinstance(tensor, Tensor) for tensor in tensors.values()):
        raise UserError(f"WEIGHTS: {weights} contains no named tensors")
    return {name: tensor.contiguous() for name, tensor in tensors.items()}


def _copy_all_but_weights(like: Path, out: Path) -> None:
    out.mkdir(parents=True)
    for path in like.iterdir():
        if path.suffix in (".json", ".txt", ".model"):
            shutil.copy(path, out)
    for index in out.glob("*.index.json"):  # for weights in several files
        index.unlink()


def _renamed(name: str, names: Names) -> str:
    for pattern, new in names:
        name = re.sub(pattern, new, name)
    return name


def _count(tensors: Mapping[str, Tensor], pattern: str) -> int:
    return sum(re.fullmatch(pattern, name) is not None for name in tensors)
