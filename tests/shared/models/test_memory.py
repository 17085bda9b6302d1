"""What a model needs is known before it is loaded."""

import json
import struct
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open

from shared.diffusion.loading.device import held_bytes
from shared.errors import UserError
from shared.messages.workers import Device
from shared.models.memory import (
    ModelPart,
    WeightsHolding,
    adapter_bytes,
    network_bytes,
    weight_bytes,
)
from shared.recipe.recipe import load_recipe, override
from tests.paths import DIGITS, ROOT

FOLDER = ROOT / "models" / "digits"
ALL: tuple[ModelPart, ...] = ("transformer", "text", "decoder")
RECIPE = load_recipe(DIGITS)
ADAPTER = held_bytes(RECIPE, [], trains=False) // 2


def elements(*folders: str) -> int:
    found = 0
    for folder in folders:
        for file in (FOLDER / folder).glob("*.safetensors"):
            with safe_open(file, "np") as tensors:
                found += sum(tensors.get_tensor(name).size for name in tensors.keys())  # noqa: SIM118
    return found


def weights(file: Path, **shapes: list[int]) -> None:
    """A file that has the header of these tensors and none of their numbers."""
    header = json.dumps({name: {"dtype": "BF16", "shape": shape} for name, shape in shapes.items()})
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(struct.pack("<Q", len(header)) + header.encode())


def test_a_role_counts_the_parts_that_it_loads_and_the_decoder_in_float32() -> None:
    text = elements("text_encoder", "text_encoder_2", "text_encoder_3")
    network, decoder = elements("transformer"), elements("vae")
    assert weight_bytes(FOLDER, "float32", ALL) == 4 * (network + text + decoder)
    assert weight_bytes(FOLDER, "bfloat16", ALL) == 2 * (network + text) + 4 * decoder
    assert weight_bytes(FOLDER, "bfloat16", ["transformer"]) == 2 * network


def test_a_whole_download_counts_what_diffusers_loads_of_it_and_nothing_twice(
    tmp_path: Path,
) -> None:
    named = {"_class_name": "FluxPipeline", "image_encoder": [None, None]} | {
        part: ["library", "Class"] for part in ("transformer", "text_encoder_2", "vae", "scheduler")
    }
    (tmp_path / "model_index.json").write_text(json.dumps(named))
    weights(tmp_path / "flux1-dev.safetensors", everything=[10**9])
    weights(tmp_path / "text_encoders" / "t5xxl.safetensors", everything=[10**9])
    network = tmp_path / "transformer"
    pieces = [f"diffusion_pytorch_model-0000{n}-of-00002.safetensors" for n in (1, 2)]
    for piece in pieces:
        weights(network / piece, **{piece[:4]: [100, 10]})
    weights(network / "diffusion_pytorch_model.fp16-00001-of-00001.safetensors", whole=[10**9])
    index = {"weight_map": dict(enumerate(pieces))}
    (network / "diffusion_pytorch_model.safetensors.index.json").write_text(json.dumps(index))
    weights(tmp_path / "text_encoder_2" / "model.safetensors", t5=[500])
    weights(tmp_path / "text_encoder_2" / "model.fp16.safetensors", t5=[500])
    weights(tmp_path / "vae" / "diffusion_pytorch_model.safetensors", conv=[10, 3, 3])
    assert weight_bytes(tmp_path, "bfloat16", ALL) == 2 * 2000 + 2 * 500 + 4 * 90
    assert weight_bytes(tmp_path, "bfloat16", ["transformer"]) == 2 * 2000


def test_a_streamed_network_counts_its_two_largest_blocks_and_what_is_outside_of_them() -> None:
    tensors = [
        ("x_embedder.weight", [10, 4]), ("norm_out.linear.weight", [6, 10]),
        ("blocks.0.attn.to_q.weight", [20, 10]), ("blocks.0.norm.weight", [20]),
        ("blocks.1.attn.to_q.weight", [30, 10]), ("single_blocks.0.proj.weight", [5, 10]),
    ]  # fmt: skip
    outside, largest, every = 40 + 60, 300, 220 + 300 + 50
    assert network_bytes(tensors, "bfloat16") == 2 * (outside + every)
    streamed = WeightsHolding(memory="streamed")
    assert network_bytes(tensors, "bfloat16", streamed) == 2 * (outside + 2 * largest)
    assert network_bytes(tensors, "float32", WeightsHolding("bf16")) == 2 * (outside + every)
    both = WeightsHolding("int8", "streamed")
    assert network_bytes(tensors, "bfloat16", both) == 2 * outside + 2 * (300 + 2 * 30)
    both = WeightsHolding("nf4", "streamed")
    largest = 4 * (32 + 2) + 2 * 20  # groups of 64, the last of which is padded, and the norm
    assert network_bytes(tensors, "bfloat16", both) == 2 * outside + 2 * largest


def test_an_adapter_counts_the_matrices_that_it_changes(tmp_path: Path) -> None:
    (tmp_path / "model_index.json").write_text('{"transformer": ["library", "Class"]}')
    weights(
        tmp_path / "transformer" / "diffusion_pytorch_model.safetensors",
        **{"a.to_q.weight": [30, 20], "a.to_q.bias": [30], "b.to_q.weight": [30, 20], "up": [9, 9]},
    )
    assert adapter_bytes(tmp_path, 4, ["to_q"]) == 4 * 2 * 4 * (30 + 20)
    assert adapter_bytes(tmp_path, 4, ["to_q"], ["b."]) == 4 * 4 * (30 + 20)


SHARED = {"schedule.mode": "fluid", "trainer.devices": 8, "trainer.shard_devices": 8}


def test_a_member_that_only_trains_needs_no_encoders_and_holds_its_sums_and_states() -> None:
    assert ADAPTER > 0
    assert held_bytes(RECIPE, ["transformer"], trains=True) == (
        4 * elements("transformer") + 6 * ADAPTER
    )
    full = override(RECIPE, {"model.trained": "full", "algorithm.kl_beta": 0.0})
    network = 4 * elements("transformer")
    assert held_bytes(full, ["transformer"], trains=True) == 6 * network
    assert held_bytes(full, ["transformer"], trains=False) == 2 * network
    sharded = override(full, SHARED)
    assert held_bytes(sharded, ["transformer"], trains=True) == 6 * network // 8
    half = override(full, {"model.dtype": "bfloat16"})
    number = network // 4
    assert held_bytes(half, ["transformer"], trains=True) == (2 + 4 + 3 * 4 + 8) * number
    assert held_bytes(half, ["transformer"], trains=False) == (2 + 2) * number
    shared = override(half, SHARED)
    assert held_bytes(shared, ["transformer"], trains=True) == 6 * 4 * number // 8
    quantised = override(RECIPE, {"model.weights": "int8"})
    saved = weight_bytes(FOLDER, "float32", ["transformer"]) - weight_bytes(
        FOLDER, "float32", ["transformer"], WeightsHolding("int8")
    )
    assert saved > 0
    assert held_bytes(quantised, ["transformer"], trains=True) == (
        held_bytes(RECIPE, ["transformer"], trains=True) - saved
    )
    adapted = override(RECIPE, SHARED)
    assert held_bytes(adapted, ["transformer"], trains=True) == network // 8 + 6 * ADAPTER


NFT = {
    "algorithm.name": "diffusion-nft", "algorithm.nft_decay": 1, "algorithm.advantage_std": "group",
}  # fmt: skip
ALL_WEIGHTS = {"model.trained": "full", "algorithm.kl_beta": 0.0, "model.dtype": "bfloat16"}
AHEAD = {"schedule.max_staleness": 1}


@pytest.mark.parametrize(
    ("changes", "of_passes", "in_float32"),
    [
        # gradient, its copy, the total of all members and two moments
        ({}, 0, 5),
        ({"trainer.ema": 0.9}, 0, 6),
        (AHEAD, 2, 5),
        (NFT, 1, 5),
        (NFT | AHEAD, 4, 5),
        (ALL_WEIGHTS, 0, 6),
        (ALL_WEIGHTS | AHEAD, 2, 6),
    ],
)
def test_a_fluid_device_counts_each_set_of_what_it_trains(
    changes: dict[str, Any], of_passes: int, in_float32: int
) -> None:
    fluid = {"schedule.mode": "fluid", "rollout.workers": 0, "trainer.updates": 1}
    recipe = override(RECIPE, fluid | changes)
    network = 4 * elements("transformer") // (2 if recipe.model.dtype == "bfloat16" else 1)
    one, wide = (network, 2 * network) if recipe.model.trained == "full" else (ADAPTER, ADAPTER)
    own = 0 if recipe.model.trained == "full" else ADAPTER
    assert held_bytes(recipe, ["transformer"], trains=True) == (
        network + own + of_passes * one + in_float32 * wide
    )


@pytest.mark.parametrize("index", [None, "[]", "{"])
def test_a_folder_that_is_no_model_is_named(tmp_path: Path, index: str | None) -> None:
    if index is not None:
        (tmp_path / "model_index.json").write_text(index)
    with pytest.raises(UserError, match="is not a diffusers model"):
        weight_bytes(tmp_path, "float32", ALL)


def test_a_file_that_holds_no_tensors_is_named(tmp_path: Path) -> None:
    (tmp_path / "model_index.json").write_text('{"vae": ["diffusers", "AutoencoderKL"]}')
    (tmp_path / "vae").mkdir()
    (tmp_path / "vae" / "model.safetensors").write_bytes(b"\x00" * 4)
    with pytest.raises(UserError, match=r"model\.safetensors is not a safetensors file"):
        weight_bytes(tmp_path, "float32", ALL)


def test_a_device_that_is_too_small_is_refused_with_the_figures() -> None:
    assert Device(memory_bytes=10, needs_bytes=10).refusal is None
    small = Device(kind="RTX 4090", memory_bytes=24 * 2**30, needs_bytes=41 * 2**30)
    assert small.refusal == "the model needs 41.00 GiB, this RTX 4090 has 24.00 GiB"
