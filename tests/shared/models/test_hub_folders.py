"""What is counted of a downloaded repository is what its configurations make: part by part.

The repositories are files with true headers and true sizes, and holes instead of weights. Beside
the parts lie what the hub has there as well: the same weights in single files and in other types.
"""

import json
import math
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from shared.models.catalogue import check_family
from shared.models.memory import DECODER_BYTES, ModelPart, num_weights, weight_bytes
from tests.paths import ROOT

PUBLISHED = ROOT / "shared" / "models" / "published"
BYTES = {"BF16": 2, "F16": 2, "F32": 4}
SHARD_BYTES = 9_900_000_000
PARTS: Mapping[ModelPart, str] = {
    "transformer": "transformer",
    "text": "text_encoder",
    "decoder": "vae",
}

Shapes = dict[str, list[int]]

SD3 = {
    "types": {"transformer": "BF16", "text": "F16", "decoder": "BF16"},
    "single": ("text_encoders/clip_g", "text_encoders/clip_l", "text_encoders/t5xxl_fp16",
               "text_encoders/t5xxl_fp8_e4m3fn"),
    "variants": ("text_encoder", "text_encoder_2", "text_encoder_3"),
}  # fmt: skip
WAN = {"types": {"transformer": "F32", "text": "F32", "decoder": "F32"}}
HALF = {"types": {"transformer": "BF16", "text": "BF16", "decoder": "BF16"}}
REPOSITORIES: Mapping[str, Mapping[str, Any]] = {
    "flux1-dev": {**HALF, "single": ("flux1-dev", "ae")},
    "sd35-medium": {**SD3, "single": ("sd3.5_medium", *SD3["single"])},
    "sd35-large": {**SD3, "single": ("sd3.5_large", *SD3["single"])},
    "qwen-image": HALF,
    "wan2.1-14b": WAN,
    "wan2.1-1.3b": WAN,
    "wan2.2-a14b": WAN,
    "hunyuanvideo": {**HALF, "types": {"transformer": "BF16", "text": "F16", "decoder": "F16"}},
}
"""What each repository holds besides its parts: single files, and parts that there are twice."""

EVERY_TIME = "sd35-large"


def made_on_meta(folder: Path, name: str, library: str, class_name: str) -> nn.Module:
    """The part of a model that its configuration makes, without weights."""
    import diffusers
    import transformers

    plain = json.loads((folder / name / "config.json").read_text())
    with torch.device("meta"):
        if library == "diffusers":
            made: nn.Module = getattr(diffusers, class_name).from_config(plain)
        else:
            build = getattr(transformers, class_name)
            made = build(build.config_class.from_dict(plain))
    return made


def shapes_of(module: nn.Module) -> Shapes:
    """What a file of the module holds: tensors that are shared once."""
    twice = dict(module.named_parameters(remove_duplicate=False)).keys()
    once = dict(module.named_parameters()).keys()
    return {
        name: list(tensor.shape)
        for name, tensor in module.state_dict().items()
        if name in once or name not in twice
    }


def write(file: Path, shapes: Shapes, dtype: str) -> None:
    header, end = {}, 0
    for name, shape in shapes.items():
        begin, end = end, end + math.prod(shape) * BYTES[dtype]
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
    encoded = json.dumps(header).encode()
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("wb") as stream:
        stream.write(struct.pack("<Q", len(encoded)) + encoded)
        stream.truncate(8 + len(encoded) + end)


def shards(shapes: Shapes, dtype: str) -> Iterator[Shapes]:
    shard: Shapes = {}
    size = 0
    for name, shape in shapes.items():
        own = math.prod(shape) * BYTES[dtype]
        if shard and size + own > SHARD_BYTES:
            yield shard
            shard, size = {}, 0
        shard[name], size = shape, size + own
    yield shard


def write_part(folder: Path, stem: str, shapes: Shapes, dtype: str, variant: str = "") -> None:
    """Writes a part as `save_pretrained` does: one file, or shards and their index."""
    pieces = list(shards(shapes, dtype))
    if len(pieces) == 1:
        write(folder / f"{stem}{variant}.safetensors", shapes, dtype)
        return
    where: dict[str, str] = {}
    for number, piece in enumerate(pieces, 1):
        name = f"{stem}{variant}-{number:05d}-of-{len(pieces):05d}.safetensors"
        write(folder / name, piece, dtype)
        where |= dict.fromkeys(piece, name)
    index = folder / f"{stem}.safetensors.index{variant}.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": where}))


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name == EVERY_TIME else pytest.mark.slow)
        for name in REPOSITORIES
    ],
)
def test_a_downloaded_repository_counts_what_its_configurations_make(
    name: str, tmp_path: Path
) -> None:
    published, has = PUBLISHED / name, REPOSITORIES[name]
    index = json.loads((published / "model_index.json").read_text())
    for file in published.rglob("*.json"):
        target = tmp_path / file.relative_to(published)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(file.read_bytes())
    expected = dict.fromkeys(PARTS, 0)
    for part, begin in PARTS.items():
        for folder in (each for each in index if each.startswith(begin)):
            library, class_name = index[folder]
            shapes = shapes_of(made_on_meta(published, folder, library, class_name))
            stem = "diffusion_pytorch_model" if library == "diffusers" else "model"
            write_part(tmp_path / folder, stem, shapes, has["types"][part])
            if folder in has.get("variants", ()):
                write_part(tmp_path / folder, stem, shapes, "F16", variant=".fp16")
            expected[part] += sum(map(math.prod, shapes.values()))
    for single in has.get("single", ()):
        write(tmp_path / f"{single}.safetensors", {"everything": [5_000_000_000]}, "BF16")

    check_family(tmp_path)
    assert {part: num_weights(tmp_path, part) for part in PARTS} == expected
    assert all(expected.values())
    wanted = 2 * (expected["transformer"] + expected["text"]) + DECODER_BYTES * expected["decoder"]
    assert weight_bytes(tmp_path, "bfloat16", list(PARTS)) == wanted
    holes = sum(each.stat().st_size - each.stat().st_blocks * 512 for each in tmp_path.rglob("*.*"))
    assert holes > wanted // 2, "nothing was written but headers"
