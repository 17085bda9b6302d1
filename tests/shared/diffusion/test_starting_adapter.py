"""A run that begins from a LoRA: in every layout, of every family, against diffusers."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from digenrl.report.export import export_adapter, read_adapter
from digenrl.report.layouts import Layout
from shared.diffusion.loading.models import repeat_rows
from shared.diffusion.policy import LoadedPolicy, load_policy
from shared.diffusion.sampling.sampler import Denoising, SamplingPlan, denoise
from shared.diffusion.training.gradient import GradientTransaction
from shared.diffusion.weights.trained_weights import load_weights, trained_tensors
from shared.errors import UserError
from shared.models.lora_files import FILES, read_lora
from shared.models.lora_header import METADATA_KEY, PEFT_CONFIG, PEFT_FILE
from shared.models.lora_names import HIGH, LOW
from shared.models.memory import ModelPart
from shared.recipe.recipe import Recipe, load_recipe
from tests import tiny_models
from tests.report import tiny_recipes
from tests.report.tiny_recipes import HEIGHT, STEPS, recipe_of

RANK, ALPHA = 4, 16.0
WIDTH = 64
"""LTX-2's pipeline takes multiples of 32."""
QUICK = ("sd3", "flux")
FAMILIES = tiny_models.but_slow(
    QUICK,
    (
        *tiny_models.FAMILIES, "wan22", "flux2", "flux2-klein", "z-image", "hunyuan-video15",
        "ltx2", *tiny_models.EDITS,
    ),
)  # fmt: skip
GUIDANCE = {**tiny_recipes.GUIDANCE, **dict.fromkeys(("wan", "wan22", "wan-i2v", "wan22-i2v"), 2.0)}
"""Wan's pipeline runs the halves of the batch one by one: rounding differs, and grows with it."""
WHOLE: set[ModelPart] = {"transformer", "text", "decoder"}


def drawn(policy: LoadedPolicy, seed: int = 1) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    tensors = trained_tensors(policy.model.transformer)
    return {n: 0.05 * torch.randn(t.shape, generator=generator) for n, t in tensors.items()}


def with_adapter(folder: Path, adapter: Path, **changes: Any) -> Recipe:
    """The recipe of ``folder``, from this adapter and without a `model.lora` of its own."""
    plain = json.loads((folder / "recipe.json").read_text())
    del plain["model"]["lora"]
    plain["model"]["adapter"] = str(adapter)
    for table, keys in changes.items():
        plain[table] = plain.get(table, {}) | keys
    path = folder / "from-adapter.json"
    path.write_text(json.dumps(plain))
    return load_recipe(path)


def same(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[n], other[n]) for n in one)


# Of Wan-I2V, diffusers adds the layers of the image, which this LoRA does not adapt, as zeros.
@pytest.mark.filterwarnings("ignore:While injecting the PEFT adapters:RuntimeWarning")
@pytest.mark.parametrize("family", FAMILIES)
def test_version_0_samples_as_diffusers_does_with_that_lora(family: str, tmp_path: Path) -> None:
    recipe = recipe_of(family, tmp_path)
    tensors = drawn(load_policy(recipe, {"transformer"}))
    assert (recipe.model.lora.rank, recipe.model.lora.alpha) == (RANK, ALPHA)
    has_two = family.startswith("wan22")
    layouts = [each for each in Layout if not has_two or each is not Layout.peft]
    for layout in layouts:
        export_adapter(tmp_path / layout, tensors, recipe, layout)
        begun = with_adapter(tmp_path, tmp_path / layout)
        assert begun.model.lora.rank == RANK and begun.model.lora.alpha == ALPHA
        assert same(read_adapter(tmp_path / layout, begun)[0], tensors), layout
    begun = with_adapter(tmp_path, tmp_path / Layout.comfyui)
    policy = load_policy(begun, WHOLE)
    assert same(trained_tensors(policy.model.transformer), tensors)

    pipeline = tiny_models.build(family)
    for network, file in FILES.items():
        if (tmp_path / "diffusers" / file).exists():
            second = {} if network == HIGH else {"load_into_transformer_2": True}
            loads = getattr(pipeline, "load_lora_weights", pipeline.transformer.load_lora_adapter)
            loads(tmp_path / "diffusers", weight_name=file, **second)
    theirs = samples_of(family, pipeline, policy)
    ours = own_samples(family, policy, pipeline)
    assert float((ours - theirs).abs().max()) <= 2e-6
    getattr(pipeline, "unload_lora_weights", pipeline.transformer.unload_lora)()
    if not has_two:  # the second network's stays
        assert float((samples_of(family, pipeline, policy) - theirs).abs().max()) > 1e-4


def shape_of(policy: LoadedPolicy) -> tuple[int, ...]:
    frames = 5 if policy.model.spec.makes_videos else 1  # type: ignore[attr-defined]
    return policy.model.latent_shape(height=HEIGHT, width=WIDTH, frames=frames)


def start_of(policy: LoadedPolicy) -> Tensor:
    plan = SamplingPlan(sigmas=(1.0, 0.0), window=range(0))
    return Denoising(
        plan, seeds=[3], shape=shape_of(policy), device=torch.device("cpu")
    ).latents  # fmt: skip


def samples_of(family: str, pipeline: Any, policy: LoadedPolicy) -> Tensor:
    return tiny_models.run(
        family, pipeline, start_of(policy), guidance=GUIDANCE[family], output="latent",
        height=HEIGHT, width=WIDTH, frames=5 if family in tiny_models.VIDEO else 1, steps=STEPS,
    )  # fmt: skip


def own_samples(family: str, policy: LoadedPolicy, pipeline: Any) -> Tensor:
    model, guidance = policy.model, GUIDANCE[family]
    source = tiny_models.source(family, HEIGHT, WIDTH)
    frames = 5 if family in tiny_models.VIDEO else 1
    plan = SamplingPlan(sigmas=tuple(pipeline.scheduler.sigmas.tolist()), window=range(0))
    encoded = model.encode(tiny_models.PROMPT, guidance=guidance, image=source, frames=frames)
    conditions = repeat_rows(encoded, 1)
    with torch.no_grad():
        return denoise(
            lambda latents, sigma: model.velocity(latents, sigma, conditions, guidance=guidance),
            Denoising(plan, seeds=[3], shape=shape_of(policy), device=torch.device("cpu")),
        )


READ_BY_DIFFUSERS = {
    "flux": (Layout.kohya, "single_"),
    "qwen-image": (Layout.kohya, None),
    "wan": (Layout.comfyui, None),
}
"""Layouts of other tools that diffusers reads of a family, and how layers begin that it cannot read
of a small model: it expects the widths of the published one."""


@pytest.mark.parametrize("family", READ_BY_DIFFUSERS)
def test_other_layouts_are_what_diffusers_reads_as_such(family: str, tmp_path: Path) -> None:
    recipe = recipe_of(family, tmp_path)
    layout, unread = READ_BY_DIFFUSERS[family]
    tensors = drawn(load_policy(recipe, {"transformer"}))
    tensors = {n: each for n, each in tensors.items() if unread is None or not n.startswith(unread)}
    export_adapter(tmp_path / layout, tensors, recipe, layout)
    pipeline = tiny_models.build(family)
    pipeline.load_lora_weights(tmp_path / layout, weight_name=FILES[HIGH])
    for name in {each.split(".lora_")[0] for each in tensors}:
        theirs = pipeline.transformer.get_submodule(name).get_delta_weight("default_0")
        down, up = (tensors[f"{name}.lora_{side}.weight"] for side in "AB")
        torch.testing.assert_close(theirs, up @ down * ALPHA / RANK, rtol=1e-5, atol=1e-6)


@pytest.fixture(scope="module")
def flux(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Recipe, dict[str, Tensor]]:
    """A folder with a recipe and an adapter in each layout."""
    folder = tmp_path_factory.mktemp("flux")
    recipe = recipe_of("flux", folder)
    tensors = drawn(load_policy(recipe, {"transformer"}))
    for layout in Layout:
        export_adapter(folder / layout, tensors, recipe, layout)
    return folder, recipe, tensors


Flux = tuple[Path, Recipe, dict[str, Tensor]]


def test_a_matrix_that_layers_share_gives_each_its_rows(flux: Flux, tmp_path: Path) -> None:
    """Most Kohya files share one matrix A between q, k and v."""
    folder, recipe, _ = flux
    name = "lora_unet_double_blocks_0_img_attn_qkv"
    width = 3 * recipe_width(recipe)
    down, up = torch.randn(RANK, width // 3), torch.randn(width, RANK)
    file = tmp_path / "sft.safetensors"
    plain = {f"{name}.lora_down.weight": down, f"{name}.lora_up.weight": up}
    save_file({**plain, f"{name}.alpha": torch.tensor(2.0, dtype=torch.bfloat16)}, file)
    begun = with_adapter(folder, file)
    assert (begun.model.lora.rank, begun.model.lora.alpha) == (RANK, 2.0)
    assert begun.model.lora.targets == tuple(
        f"transformer_blocks.0.attn.{layer}" for layer in ("to_k", "to_q", "to_v")
    )
    tensors, _ = read_adapter(file, begun)
    for number, layer in enumerate(("to_q", "to_k", "to_v")):
        named = f"transformer_blocks.0.attn.{layer}.lora_"
        assert torch.equal(tensors[f"{named}A.weight"], down)
        assert torch.equal(tensors[f"{named}B.weight"], up.chunk(3)[number])


def recipe_width(recipe: Recipe) -> int:
    config = json.loads((recipe.model.folder / "transformer/config.json").read_text())
    return int(config["num_attention_heads"] * config["attention_head_dim"])


Q = "transformer.transformer_blocks.0.attn.to_q"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"text_encoder.text_model.encoder.layers.0.self_attn.q_proj.lora_A.weight": (4, 8)},
         "adapts a text encoder"),
        ({"lora_te1_text_model_encoder_layers_0_mlp_fc1.lora_down.weight": (4, 8)},
         "adapts a text encoder"),
        ({"transformer.transformer_blocks.9.attn.to_q.lora_A.weight": (4, 8)},
         r"transformer_blocks\.9\.attn\.to_q, which is no linear layer of this FluxPipeline"),
        ({f"{Q}.dora_scale": (8,)}, "dora_scale, which is no part of a plain LoRA"),
        ({f"{Q}.lora_A.weight": (8, 16)}, "which are no B and A"),
        ({f"{Q}.lora_A.weight": (8, 16), f"{Q}.lora_B.weight": (4, 8)}, "which is a layer of"),
        ({f"{Q}.lora_B.weight": None}, "only one of the two matrices"),
        ({f"{Q}.alpha": (1,)}, r"different alphas \(1, 16\)"),
        ({f"{Q}.alpha": ()}, r"has the alpha 0 for .*to_q; it has to be above 0"),
        ({f"{Q}.lora_A.weight": (0, 8), f"{Q}.lora_B.weight": (8, 0)}, "matrices without numbers"),
    ],
)  # fmt: skip
def test_what_is_no_plain_lora_of_the_network_is_refused(
    changes: Mapping[str, tuple[int, ...] | None], said: str, flux: Flux, tmp_path: Path
) -> None:
    folder, recipe, _ = flux
    tensors = load_file(folder / "diffusers" / FILES[HIGH])
    for name, shape in changes.items():
        tensors.pop(name, None)
        if shape is not None:
            tensors[name] = torch.ones(shape) if shape else torch.tensor(0)
    config = {"transformer.lora_alpha": ALPHA, "transformer.r": RANK}
    save_file(tensors, tmp_path / "a.safetensors", {METADATA_KEY: json.dumps(config)})
    with pytest.raises(UserError, match=rf"^model\.adapter: .*{said}") as refused:
        read_lora(tmp_path, recipe.model.folder)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("key", "value"), [("use_dora", True), ("use_rslora", True), ("init_lora_weights", "pissa")]
)
def test_an_adapter_of_peft_that_is_no_plain_lora_is_refused(
    key: str, value: object, flux: Flux, tmp_path: Path
) -> None:
    folder, recipe, _ = flux
    (tmp_path / PEFT_FILE).write_bytes((folder / "peft" / PEFT_FILE).read_bytes())
    with pytest.raises(UserError, match=f"needs its {PEFT_CONFIG} in the same"):
        read_lora(tmp_path, recipe.model.folder)
    config = json.loads((folder / "peft" / PEFT_CONFIG).read_text())
    (tmp_path / PEFT_CONFIG).write_text(json.dumps(config | {key: value}))
    with pytest.raises(UserError, match=f"a LoRA with {key} = "):
        read_lora(tmp_path, recipe.model.folder)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ("[]", f"has no JSON object as its {PEFT_CONFIG}"),
        ("{", f"has no JSON object as its {PEFT_CONFIG}"),
        ('{"alpha_pattern": {"(": 3}}', "has an invalid alpha_pattern"),
    ],
)
def test_a_configuration_that_cannot_be_read_is_one_line(
    config: str, said: str, flux: Flux, tmp_path: Path
) -> None:
    (tmp_path / PEFT_FILE).write_bytes((flux[0] / "peft" / PEFT_FILE).read_bytes())
    (tmp_path / PEFT_CONFIG).write_text(config)
    with pytest.raises(UserError, match=rf"^model\.adapter: .*{said}"):
        read_lora(tmp_path, flux[1].model.folder)


def test_a_file_that_is_broken_off_is_refused_by_its_header(flux: Flux, tmp_path: Path) -> None:
    whole = (flux[0] / "kohya" / FILES[HIGH]).read_bytes()
    (tmp_path / "a.safetensors").write_bytes(whole[:-1])
    with pytest.raises(UserError, match=r"^model\.adapter: .*is broken off; copy or fetch it"):
        read_lora(tmp_path, flux[1].model.folder)


def test_an_alpha_may_be_a_whole_number(flux: Flux, tmp_path: Path) -> None:
    tensors = load_file(flux[0] / "kohya" / FILES[HIGH])
    whole = {
        n: each.to(torch.int64) if n.endswith(".alpha") else each for n, each in tensors.items()
    }
    save_file(whole, tmp_path / "a.safetensors")
    assert read_lora(tmp_path, flux[1].model.folder).alpha == ALPHA


def test_a_file_for_low_noise_is_not_taken_for_high_noise(tmp_path: Path) -> None:
    folder = tiny_models.save("wan22", tmp_path / "model")
    file = tmp_path / "mine_Low_noise.safetensors"
    save_file({}, file)
    with pytest.raises(UserError, match=rf"alone would be taken for .* as {FILES[LOW]}, togeth"):
        read_lora(file, folder)


@pytest.mark.parametrize("name", ["lora.ckpt", "lora.bin", "none"])
def test_only_safetensors_are_read(name: str, flux: Flux, tmp_path: Path) -> None:
    if name != "none":
        (tmp_path / name).write_bytes(b"a pickle")
    with pytest.raises(UserError, match=r"safetensors"):
        read_lora(tmp_path / name, flux[1].model.folder)
    with pytest.raises(UserError, match="has to hold one safetensors file, and holds none"):
        read_lora(tmp_path, flux[1].model.folder)
    (tmp_path / "cut.safetensors").write_bytes(b"\0" * 20)
    with pytest.raises(UserError, match=r"^model\.adapter: .*is not a safetensors file"):
        read_lora(tmp_path, flux[1].model.folder)


@pytest.mark.parametrize(
    ("lora", "key"),
    [({"rank": 8}, "rank"), ({"alpha": 2.0}, "alpha"), ({"targets": ["attn.to_q"]}, "targets")],
)
def test_a_table_that_disagrees_with_the_adapter_is_refused(
    lora: Mapping[str, object], key: str, flux: Flux
) -> None:
    folder, recipe, _ = flux
    adapter = str(folder / "kohya")
    with pytest.raises(UserError, match=rf"model\.lora\.{key}: .* differs from model\.adapter"):
        with_adapter(folder, folder, model=json_model(recipe) | {"adapter": adapter, "lora": lora})
    agrees = {"rank": RANK, "alpha": ALPHA, "targets": list(recipe_targets(folder))}
    table = json_model(recipe) | {"adapter": adapter, "lora": agrees}
    assert with_adapter(folder, folder, model=table).model.lora.rank == RANK


def json_model(recipe: Recipe) -> dict[str, Any]:
    return recipe.model.model_dump(mode="json", exclude={"lora", "adapter"})


def recipe_targets(folder: Path) -> tuple[str, ...]:
    return with_adapter(folder, folder / "diffusers").model.lora.targets


def test_the_reference_is_the_adapter_that_the_run_began_from(flux: Flux) -> None:
    folder, _, tensors = flux
    for reference in (None, "adapter", "base"):
        table = {"kl_beta": 0.1} | ({} if reference is None else {"reference": reference})
        recipe = with_adapter(folder, folder / "peft", algorithm=table)
        assert recipe.keeps_reference == (reference != "base")
        policy = load_policy(recipe, {"transformer", "decoder"}, trains=True)
        transaction = GradientTransaction.from_recipe(recipe, policy.model, policy.sets)
        began, at = asked(transaction, policy)
        with torch.no_grad():
            policy.model.transformer.disable_adapters()  # type: ignore[operator]
            base, _ = asked(transaction, policy, network=True)
            policy.model.transformer.enable_adapters()  # type: ignore[operator]
        wanted = base if reference == "base" else at
        torch.testing.assert_close(began, wanted, rtol=0, atol=1e-6)
        load_weights(policy.model.transformer, drawn(policy, seed=2))
        after, moved = asked(transaction, policy)
        assert torch.equal(after, began) and not torch.allclose(moved, at, atol=1e-4)
        assert same(trained_tensors(policy.model.transformer), drawn(policy, seed=2))
    assert same(drawn(policy), tensors)


def asked(
    transaction: GradientTransaction, policy: LoadedPolicy, *, network: bool = False
) -> tuple[Tensor, Tensor]:
    """Velocities of the reference and of the network; of the network alone if asked."""
    latents = start_of(policy)
    shapes = policy.model.spec.condition_shapes(policy.model.config, 6)  # type: ignore[attr-defined]
    generator = torch.Generator().manual_seed(0)
    conditions = {n: torch.randn(1, *shape, generator=generator) for n, shape in shapes.items()}
    told = latents, torch.tensor([0.7]), conditions
    with torch.no_grad():
        velocity = transaction.velocity(*told)
        return (velocity if network else transaction.reference_velocity(*told)), velocity
