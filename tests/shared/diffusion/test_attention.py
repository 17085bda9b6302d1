"""No mask keeps attention from being flash attention, and a back end is named once for all."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers.models import attention_dispatch
from diffusers.models.attention_dispatch import AttentionBackendName, _AttentionBackendRegistry
from torch import Tensor
from torch.nn import functional

from shared.diffusion.families.latents import pack as tokens_of
from shared.diffusion.families.latents import unpack as latents_from
from shared.diffusion.loading.models import (
    Conditions,
    ModelAdapter,
    ModelPart,
    load_model,
    repeat_rows,
    without_masks,
)
from shared.diffusion.sampling.tensors import pack, unpack_conditions
from shared.diffusion.weights.trained_weights import trained_parameters
from shared.errors import UserError
from shared.models import attention
from shared.models.families import FAMILIES
from shared.recipe.networks import check_networks
from shared.recipe.recipe import load_recipe, override
from tests import tiny_models
from tests.paths import DIGITS
from tests.shared.diffusion.ratio_error import GUIDANCES
from tests.tiny_models import PROMPT

CPU = torch.device("cpu")
CUT = {"qwen-image": 1.5, "hunyuan-video": 6.0}
"""Families whose pipelines mask the padding of texts, and a guidance that adds no rounding."""
OLD_LENGTH = 300
ALL: set[ModelPart] = {"transformer", "text", "decoder"}
load = partial(load_model, device=CPU, dtype=torch.float32)


@pytest.fixture(scope="module", params=tiny_models.FAMILIES)
def named(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> "Named":
    name = request.param
    return name, tiny_models.save(name, tmp_path_factory.mktemp(name))


Named = tuple[str, Path]


def latents_of(name: str, model: ModelAdapter) -> Tensor:
    frames = 5 if name in tiny_models.VIDEO else 1
    shape = model.latent_shape(height=32, width=32, frames=frames)
    return torch.randn(2, *shape, generator=torch.Generator().manual_seed(0))


def gradient(model: ModelAdapter, name: str, conditions: Conditions) -> Tensor:
    """Returns the velocities of two rows, and after them the gradient of every trained weight."""
    sigma, guidance = torch.tensor([0.9, 0.4]), GUIDANCES[name][-1]
    rows = repeat_rows(conditions, 2)
    velocity = model.velocity(latents_of(name, model), sigma, rows, guidance=guidance)
    velocity.square().mean().backward()
    trained = trained_parameters(model.transformer).values()
    gradients = [each.grad.flatten() for each in trained if each.grad is not None]
    return torch.cat([velocity.detach().flatten(), *gradients])


def adapted(model: ModelAdapter) -> ModelAdapter:
    tiny_models.add_lora(model)
    model.transformer.enable_gradient_checkpointing()  # type: ignore[operator]
    return model


def test_no_mask_reaches_attention_in_sampling_or_training(
    named: Named, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, folder = named
    model = adapted(load(folder, ALL))
    conditions = model.encode(PROMPT, guidance=GUIDANCES[name][-1])
    original, seen = functional.scaled_dot_product_attention, []

    def attend(*given: Any, **named: Any) -> Tensor:
        seen.append(given[3] if len(given) > 3 else named.get("attn_mask"))
        return original(*given, **named)

    monkeypatch.setattr(functional, "scaled_dot_product_attention", attend)
    gradient(model, name, conditions)
    assert seen and all(mask is None for mask in seen)


@pytest.mark.parametrize("name", CUT)
def test_a_text_of_its_own_length_does_what_a_masked_one_does(name: str, tmp_path: Path) -> None:
    guidance = CUT[name]
    model = load(tiny_models.save(name, tmp_path), ALL)
    conditions = model.encode(PROMPT, guidance=guidance)
    lengths = {key: each.shape[1] for key, each in conditions.items() if key.endswith("text")}
    assert (
        not any(key.endswith("mask") for key in conditions) and max(lengths.values()) < OLD_LENGTH
    )
    stored = {**conditions}
    for key, length in lengths.items():
        stored[key] = functional.pad(conditions[key], (0, 0, 0, OLD_LENGTH - length), value=0.7)
        mask = torch.arange(OLD_LENGTH)[None] < length
        stored[key.replace("text", "mask")] = mask if name == "qwen-image" else mask.long()
    again = without_masks(unpack_conditions(pack(stored)))
    assert again.keys() == conditions.keys()
    assert all(torch.equal(again[key], each) for key, each in conditions.items())
    latents, sigma = latents_of(name, model), torch.tensor([0.9, 0.4])
    with torch.no_grad():
        ours = model.velocity(latents, sigma, repeat_rows(conditions, 2), guidance=guidance)
        theirs = masked(name, model, latents, sigma, repeat_rows(stored, 2))
    assert float((ours - theirs).abs().max()) <= 1e-6


def masked(name: str, model: Any, latents: Tensor, sigma: Tensor, conditions: Conditions) -> Tensor:
    """What diffusers' own network makes of padded texts and their masks."""
    network = tiny_models.build(name).transformer
    if name == "hunyuan-video":
        found: Tensor = network(
            latents, sigma * 1000, conditions["text"], conditions["mask"], conditions["pooled"],
            torch.full((2,), CUT[name] * 1000), return_dict=False,
        )[0]  # fmt: skip
        return found
    halves = [
        network(
            tokens_of(latents), conditions[f"{half}text"], conditions[f"{half}mask"],
            sigma, img_shapes=[[(1, 2, 2)]] * 2, return_dict=False,
        )[0]
        for half in ("negative_", "")
    ]  # fmt: skip
    unconditional, conditional = (latents_from(each, 4, 4) for each in halves)
    return model.guided(unconditional, conditional, CUT[name])  # type: ignore[no-any-return]


def test_a_named_back_end_samples_and_trains_with_the_network(named: Named) -> None:
    """torch's flash attention takes no mask: diffusers refuses one."""
    name, folder = named
    usual = adapted(load(folder, ALL))
    conditions = usual.encode(PROMPT, guidance=GUIDANCES[name][-1])
    if "sd3" in name:
        pytest.skip("its network asks torch directly")
    wanted = gradient(usual, name, conditions)
    before = _AttentionBackendRegistry._active_backend
    try:
        flash = adapted(load(folder, ALL, attention="_native_flash"))
        processors = [
            getattr(getattr(each, "processor", None), "_attention_backend", None)
            for name, each in flash.transformer.named_modules()
            if "refiner" not in name and hasattr(each, "processor")
        ]
        assert processors and set(processors) == {AttentionBackendName._NATIVE_FLASH}
        torch.testing.assert_close(gradient(flash, name, conditions), wanted, rtol=0, atol=2e-6)
    finally:
        _AttentionBackendRegistry.set_active_backend(before)


def test_the_names_are_those_of_diffusers() -> None:
    names = (
        *attention.ANY_TYPE_BACKENDS, *attention.HALF_TYPE_BACKENDS, *attention.WITHOUT_BACKWARD,
        "_native_npu", "_native_xla",
    )  # fmt: skip
    assert sorted(names) == sorted(each.value for each in AttentionBackendName)
    for name in attention.ANY_TYPE_BACKENDS + attention.HALF_TYPE_BACKENDS:
        checks = _AttentionBackendRegistry._constraints[AttentionBackendName(name)]
        half = {
            attention_dispatch._check_qkv_dtype_bf16_or_fp16,
            attention_dispatch._check_qkv_dtype_bf16,
        }
        assert bool(half & set(checks)) == (name in attention.HALF_TYPE_BACKENDS), name


def test_a_network_that_asks_torch_directly_has_no_back_end_to_name(tmp_path: Path) -> None:
    for family in tiny_models.FAMILIES:
        pipeline = tiny_models.build(family)
        found = {
            hasattr(each.processor, "_attention_backend")
            for name, each in pipeline.transformer.named_modules()
            if getattr(each, "processor", None) is not None and "refiner" not in name
        }
        assert found == {FAMILIES[type(pipeline).__name__].names_attention}, family


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"model.attention": "sage"}, r"model\.attention: 'sage' has no backward pass"),
        ({"model.attention": "_flash_3"}, r"model\.attention: '_flash_3' has no backward pass"),
        ({"model.attention": "flesh"}, r"model\.attention: 'flesh' is no back end of diffusers"),
        ({"model.attention": "flash"}, r"model\.attention: 'flash' takes .* not float32"),
    ],
)
def test_a_name_that_cannot_train_is_refused_in_one_line(changes: Any, said: str) -> None:
    with pytest.raises(UserError, match=said) as refused:
        override(load_recipe(DIGITS), changes)
    assert "\n" not in str(refused.value)


def test_what_this_host_or_this_model_cannot_do_is_refused_in_one_line(tmp_path: Path) -> None:
    named = override(load_recipe(DIGITS), {"model.attention": "native"})
    with pytest.raises(UserError, match=r"model\.attention: the network of a StableDiffusion3"):
        check_networks(named)
    folder = tiny_models.save("wan", tmp_path)
    with pytest.raises(UserError, match=r"model\.attention: xformers needs a GPU"):
        load(folder, {"transformer"}, attention="xformers")
