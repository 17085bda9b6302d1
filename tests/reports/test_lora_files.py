"""LoRA files as other tools write them: read, or refused with the command that converts them
(diffusers#10985, sd-scripts#325, ComfyUI#4202, ChronoEdit#22)."""

import json
import re
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from typer.testing import CliRunner

from digenrl.commands import cli
from shared.diffusion.policy import load_policy
from shared.diffusion.weights.starting_adapter import lora_tensors
from shared.diffusion.weights.trained_weights import ADAPTER
from shared.errors import UserError
from shared.models.lora_files import FILES, LoraFile, read_lora
from shared.models.memory import layer_shapes
from tests import tiny_models
from tests.report.tiny_recipes import recipe_of
from tests.reports.model_folders import copy_of
from tests.shared.diffusion.test_starting_adapter import with_adapter

Tensors = dict[str, Tensor]
NAMES = {
    "diffusers": ("lora_A", "lora_B"),
    "kohya": ("lora_down", "lora_up"),
    "old": ("down", "up"),
}
Q = ("attn.to_q", "attn.to_k", "attn.to_v")
QKV, PROJ = (f"lora_unet_double_blocks_0_img_attn_{name}" for name in ("qkv", "proj"))
TEXT = {
    f"lora_te1_text_model_encoder_layers_0_mlp_fc1.lora_{side}.weight": torch.ones(shape)
    for side, shape in (("down", (4, 8)), ("up", (8, 4)))
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a family's small model."""
    made: dict[str, Path] = {}

    def folder(family: str) -> Path:
        if family not in made:
            made[family] = copy_of(family, tmp_path_factory.mktemp("models") / family)
        return made[family]

    return folder


Model = Callable[[str], Path]


def pair(stem: str, rank: int, shape: Sequence[int], kind: str = "diffusers") -> Tensors:
    outputs, inputs = shape
    down, up = NAMES[kind]
    return {
        f"{stem}.{down}.weight": torch.randn(rank, inputs) / inputs**0.5,
        f"{stem}.{up}.weight": torch.randn(outputs, rank) / rank**0.5,
    }


def lora(
    folder: Path,
    suffixes: tuple[str, ...] = Q,
    name: Callable[[str], str] = "transformer.{}".format,
    rank: Callable[[str], int] = lambda layer: 4,
    kind: str = "diffusers",
) -> Tensors:
    """Matrices of all layers of a model that end with one of the suffixes."""
    shapes = {layer: s for layer, s in layer_shapes(folder).items() if layer.endswith(suffixes)}
    pairs = (pair(name(layer), rank(layer), shape, kind) for layer, shape in shapes.items())
    return {name: tensor for each in pairs for name, tensor in each.items()}


def flat(layer: str) -> str:
    return "lora_transformer_" + layer.replace(".", "_")


def with_alphas(tensors: Tensors, *alphas: float) -> Tensors:
    """With an alpha for each layer, in turns."""
    stems = [
        name.split(".lora_")[0] for name in tensors if name.endswith(("_A.weight", "down.weight"))
    ]
    own = {f"{s}.alpha": torch.tensor(alphas[i % len(alphas)]) for i, s in enumerate(stems)}
    return tensors | own


def fused(folder: Path, *, blocks: bool, rank: int, others: int) -> Tensors:
    """Kohya's layer of q, k and v together, in blocks of their own or not, and one other layer."""
    shapes = layer_shapes(folder)
    outputs, inputs = shapes["transformer_blocks.0.attn.to_q"]
    tensors = pair(QKV, rank, (3 * outputs, inputs), "kohya")
    if blocks:
        tensors[f"{QKV}.lora_up.weight"] = torch.block_diag(
            *(torch.randn(outputs, rank // 3) for _ in range(3))
        )
    proj = shapes["transformer_blocks.0.attn.to_out.0"]
    return tensors | pair(PROJ, others, proj, "kohya")


def only_q(tensors: Tensors) -> Tensors:
    up = tensors[f"{QKV}.lora_up.weight"]
    up[len(up) // 3 :] = 0
    return tensors


def by_layer(layer: str) -> int:
    return 4 if "to_q" in layer else 8


CONVERTED: dict[str, tuple[str, Callable[[Path], Tensors], str]] = {
    "ranks that differ": ("flux", lambda m: lora(m, rank=by_layer), "--rank 8"),
    "alphas that differ": ("flux", lambda m: with_alphas(lora(m), 1.0, 4.0), "--rank 4"),
    "ranks and alphas, of Kohya": (
        "flux",
        lambda m: with_alphas(lora(m, name=flat, rank=by_layer, kind="kohya"), 2.0, 3.0),
        "--rank 8",
    ),
    "a text encoder": ("flux", lambda m: lora(m) | TEXT, "--drop text-encoder"),
    "a text encoder, and ranks": (
        "flux", lambda m: lora(m, rank=by_layer) | TEXT, "--rank 8 --drop text-encoder",
    ),
    "names of DiffSynth": (
        "z-image", lambda m: lora(m, ("attention.to_q",), "pipe.dit.{}".format), "",
    ),
    "names of DiffSynth, and ranks": (
        "z-image",
        lambda m: lora(m, ("to_q", "to_k"), "pipe.dit.{}".format, by_layer), "--rank 8",
    ),
    "8 bits": (
        "flux", lambda m: {n: t.to(torch.float8_e4m3fn) for n, t in lora(m).items()}, "",
    ),
    "q, k and v as blocks": (
        "flux", lambda m: fused(m, blocks=True, rank=12, others=8), "--rank 12",
    ),
    "q, k and v as blocks, of the rank of others": (
        "flux", lambda m: fused(m, blocks=True, rank=12, others=12), "--rank 12",
    ),
    "q alone of q, k and v": (
        "flux", lambda m: only_q(fused(m, blocks=False, rank=4, others=12)), "--rank 12",
    ),
    "q, k and v that share A": (
        "flux", lambda m: fused(m, blocks=False, rank=4, others=6), "--rank 6",
    ),
}  # fmt: skip


READ: dict[str, tuple[str, Callable[[Path], Tensors], str]] = {
    "SimpleTuner, ai-toolkit": ("flux", lora, "4 4 6"),
    "OneTrainer, bfloat16 with alphas": (
        "flux",
        lambda m: {
            name: each.bfloat16()
            for name, each in with_alphas(lora(m, name=flat, kind="kohya"), 2.0).items()
        },
        "4 2 6",
    ),
    "alphas of shape [1]": (
        "flux",
        lambda m: {
            name: each[None] if name.endswith(".alpha") else each
            for name, each in with_alphas(lora(m), 1.0).items()
        },
        "4 1 6",
    ),
    "float16": ("flux", lambda m: {name: t.half() for name, t in lora(m).items()}, "4 4 6"),
    "all linear layers": ("flux", lambda m: lora(m, ("",)), "4 4 30"),
    "a rank above the width": ("flux", lambda m: lora(m, rank=lambda layer: 512), "512 512 6"),
    "half of the blocks": (
        "sd3", lambda m: {n: t for n, t in lora(m).items() if ".0." in n}, "4 4 3",
    ),
    "lora.down and lora.up": (
        "sd3",
        lambda m: lora(m, ("attn.to_q",), "transformer.{}.lora".format, kind="old"), "4 4 2",
    ),
    "ai-toolkit, Z-Image": (
        "z-image", lambda m: lora(m, ("attention.to_q",), "diffusion_model.{}".format), "4 4 4",
    ),
    "klein, of Kohya": (
        "flux2-klein", lambda m: pair(QKV, 4, (96, 32), "kohya"), "4 4 3",
    ),
    "klein with underscores (musubi-tuner#905)": (
        "flux2-klein",
        lambda m: pair("diffusion_model.double_blocks.0.img_attn_qkv", 4, (96, 32)),
        "img_attn_qkv, which is no linear layer of this Flux2KleinPipeline's network",
    ),
    "XLabs": (
        "flux",
        lambda m: pair("double_blocks.0.processor.qkv_lora1", 4, (96, 32), "old"),
        r"qkv_lora1\.down\.weight, which is no part of a plain LoRA .*; train a plain LoRA",
    ),
    "diffusers 0.20": (
        "sd3",
        lambda m: lora(m, ("to_q",), "transformer.{}.processor.to_q_lora".format, kind="old"),
        "is no part of a plain LoRA",
    ),
    "LoKr": (
        "flux", lambda m: {"diffusion_model.x.lokr_w1": torch.ones(4, 4)}, "is no part of a plain",
    ),
    "LightX2V's diff": (
        "wan",
        lambda m: lora(m, ("attn1.to_q",)) | {"diffusion_model.blocks.0.norm3.diff": torch.ones(4)},
        r"norm3\.diff, which is no part of a plain LoRA",
    ),
    "8-bit integers": (
        "flux", lambda m: {n: t.to(torch.int8) for n, t in lora(m).items()}, "as I8; save it as bf",
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    "case",
    [name if READ[name][0] in ("flux", "sd3") else pytest.param(name, marks=pytest.mark.slow)
     for name in READ],
)  # fmt: skip
def test_files_of_other_tools_are_read_or_refused_by_their_headers(
    case: str, model: Model, tmp_path: Path
) -> None:
    family, make, said = READ[case]
    save_file(make(model(family)), tmp_path / "a.safetensors")
    try:
        read = read_lora(tmp_path, model(family))
    except UserError as refused:
        assert re.search(said, str(refused)), refused
        assert "digenrl adapter" not in str(refused)
    else:
        assert f"{read.rank} {read.alpha:g} {len(read.layers)}" == said


def run_advised(error: UserError, path: Path) -> tuple[str, Path]:
    """Execute the command at the end of a refusal; returns its options, and what it has written."""
    assert str(error).startswith("model.adapter: ") and "\n" not in str(error)
    words = shlex.split(str(error).rsplit(": ", 1)[1])
    assert words[:4] == ["digenrl", "adapter", "convert", str(path)]
    done = CliRunner().invoke(cli.app, words[1:])
    assert done.exit_code == 0, (words, done.output, done.exception)
    return shlex.join(words[5:]), Path(words[4])


def changes(read: LoraFile) -> Tensors:
    """What a LoRA adds to the weights of each layer."""
    tensors = lora_tensors(read)
    scale = read.alpha / read.rank
    return {
        layer: scale * tensors[f"{layer}.lora_B.weight"] @ tensors[f"{layer}.lora_A.weight"]
        for layer in read.layers
    }


def stored_changes(tensors: Tensors) -> Tensors:
    """The same by the names of the file."""
    found = {}
    for name, down in tensors.items():
        for a, b in NAMES.values():
            if name.endswith(f".{a}.weight"):
                stem = name.removesuffix(f".{a}.weight")
                alpha = float(tensors.get(f"{stem}.alpha", torch.tensor(len(down))))
                up = tensors[f"{stem}.{b}.weight"]
                found[stem] = alpha / len(down) * (up.float() @ down.float())
    return found


@pytest.mark.parametrize("case", CONVERTED)
def test_the_command_of_a_refusal_makes_a_file_that_is_read_and_changes_layers_alike(
    case: str, model: Model, tmp_path: Path
) -> None:
    torch.manual_seed(3)
    family, make, options = CONVERTED[case]
    folder, path = model(family), tmp_path / "my sft.safetensors"
    tensors = make(folder)
    save_file(tensors, path)
    with pytest.raises(UserError) as refused:
        read_lora(path, folder)
    given, out = run_advised(refused.value, path)
    assert given == options
    read = read_lora(out, folder)
    found, wanted = changes(read), stored_changes(tensors)
    if QKV in wanted:
        names = [f"transformer_blocks.0.attn.{each}" for each in ("to_q", "to_k", "to_v")]
        whole = wanted.pop(QKV)
        torch.testing.assert_close(
            torch.cat([found.pop(n) for n in names]), whole, rtol=0, atol=1e-5
        )
    text = [stem for stem in wanted if stem.startswith("lora_te")]
    assert len(found) == len(wanted) - len(text) > 0
    for layer, change in found.items():
        stems = {f"transformer.{layer}", f"pipe.dit.{layer}", flat(layer), PROJ} & wanted.keys()
        theirs = wanted[stems.pop()]
        torch.testing.assert_close(change, theirs, rtol=0, atol=1e-5)


def test_blocks_that_are_cut_in_two_ways_are_converted(model: Model, tmp_path: Path) -> None:
    """The first block is in blocks of zeros, the second is not: only who reads the tensors sees."""
    folder, path = model("sd3"), tmp_path / "a.safetensors"
    outputs, inputs = layer_shapes(folder)["transformer_blocks.0.attn.to_q"]
    stems = [f"joint_blocks.{number}.x_block.attn.qkv" for number in (0, 1)]
    tensors = pair(stems[0], 6, (3 * outputs, inputs)) | pair(stems[1], 6, (3 * outputs, inputs))
    tensors[f"{stems[0]}.lora_B.weight"] = torch.block_diag(*torch.randn(3, outputs, 2))
    save_file(tensors, path)
    with pytest.raises(UserError, match=r"cuts joint_blocks\.1") as refused:
        lora_tensors(read_lora(path, folder))
    options, out = run_advised(refused.value, path)
    assert options == "--rank 6"
    found, wanted = changes(read_lora(out, folder)), stored_changes(tensors)
    for number, stem in enumerate(stems):
        parts = [found[f"transformer_blocks.{number}.attn.to_{each}"] for each in "qkv"]
        torch.testing.assert_close(torch.cat(parts), wanted[stem], rtol=0, atol=1e-5)


def test_a_text_encoder_that_only_the_metadata_names_is_passed_over(
    model: Model, tmp_path: Path
) -> None:
    said = {"transformer.r": 4, "transformer.lora_alpha": 8, "text_encoder.r": 4}
    path = tmp_path / "a.safetensors"
    save_file(lora(model("flux")), path, {"lora_adapter_metadata": json.dumps(said)})
    assert read_lora(path, model("flux")).alpha == 8


@pytest.mark.parametrize("rank", [8, 3])
def test_peft_computes_the_same_change_or_the_nearest_of_the_rank(
    rank: int, tmp_path: Path
) -> None:
    torch.manual_seed(4)
    recipe, path = recipe_of("flux", tmp_path), tmp_path / "theirs.safetensors"
    tensors = lora(recipe.model.folder, rank=by_layer)
    save_file(tensors, path)
    pipeline: Any = tiny_models.build("flux")
    pipeline.load_lora_weights(path)
    convert = ["adapter", "convert", str(path), str(tmp_path / "ours.safetensors"), "--rank"]
    done = CliRunner().invoke(cli.app, [*convert, str(rank)])
    assert done.exit_code == 0 and ("does not fit the rank" in done.output) == (rank == 3)

    policy = load_policy(with_adapter(tmp_path, tmp_path / "ours.safetensors"), {"transformer"})
    layers = {name.split(".lora_")[0].removeprefix("transformer.") for name in tensors}
    for layer in layers:
        theirs = pipeline.transformer.get_submodule(layer).get_delta_weight("default_0").detach()
        ours = policy.model.transformer.get_submodule(layer).get_delta_weight(ADAPTER).detach()  # type: ignore[operator]
        left, values, right = torch.linalg.svd(theirs.double())
        nearest = left[:, :rank] * values[:rank] @ right[:rank]
        torch.testing.assert_close(ours.double(), nearest, rtol=0, atol=1e-5)


def test_every_rank_of_a_converted_adapter_can_be_trained(model: Model, tmp_path: Path) -> None:
    """Rows of A and columns of B that are both 0 would have no gradient."""
    path, tensors = tmp_path / "a.safetensors", lora(model("flux"), ("attn.to_q",))
    save_file(tensors | {name: torch.zeros_like(tensors[name]) for name in list(tensors)[:2]}, path)
    for rank in (3, 6):
        out = tmp_path / f"{rank}.safetensors"
        words = ["adapter", "convert", str(path), str(out), "--rank", str(rank)]
        assert CliRunner().invoke(cli.app, words).exit_code == 0
        for name, tensor in load_file(out).items():
            assert not name.endswith("A.weight") or torch.linalg.matrix_rank(tensor) == rank


def test_files_of_two_networks_are_converted_into_a_folder(model: Model, tmp_path: Path) -> None:
    folder, path = model("wan22"), tmp_path / "sft"
    path.mkdir()
    single = {layer.split(".", 1)[1]: s for layer, s in layer_shapes(folder).items()}
    for rank, file in zip((4, 6), FILES.values(), strict=True):
        layers = (layer for layer in single if layer.endswith("attn1.to_q"))
        pairs = [pair(f"transformer.{layer}", rank, single[layer]) for layer in layers]
        save_file({n: t for each in pairs for n, t in each.items()}, path / file)
    with pytest.raises(UserError, match=r"different ranks \(4, 6\)") as refused:
        read_lora(path, folder)
    options, out = run_advised(refused.value, path)
    assert options == "--rank 6" and {each.name for each in out.iterdir()} == set(FILES.values())
    read = read_lora(out, folder)
    assert (read.rank, read.experts) == (6, "both")
    found = changes(read)
    for prefix, file in FILES.items():
        for stem, change in stored_changes(load_file(path / file)).items():
            layer = f"{prefix}.{stem.removeprefix('transformer.')}"
            torch.testing.assert_close(found[layer], change, rtol=0, atol=1e-5)


def test_an_adapter_of_peft_needs_no_other_file_when_it_is_converted(
    model: Model, tmp_path: Path
) -> None:
    path = tmp_path / "peft"
    path.mkdir()
    tensors = lora(model("flux"), name="base_model.model.{}".format, rank=by_layer)
    save_file(tensors, path / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 8, "lora_alpha": 16, "alpha_pattern": {"to_k": 2}}
    (path / "adapter_config.json").write_text(json.dumps(config))
    with pytest.raises(UserError) as refused:
        read_lora(path, model("flux"))
    _, out = run_advised(refused.value, path)
    found = changes(read_lora(out, model("flux")))
    for layer, change in found.items():
        scale = (2 if layer.endswith("to_k") else 16) / by_layer(layer)
        down, up = (tensors[f"base_model.model.{layer}.lora_{side}.weight"] for side in "AB")
        torch.testing.assert_close(change, scale * up @ down, rtol=0, atol=2e-5)
