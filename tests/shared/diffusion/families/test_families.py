"""Every model family against diffusers' own pipeline, on small random models."""

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from shared.diffusion.families.latents import pack, unpack
from shared.diffusion.loading.models import Conditions, ModelAdapter, load_model, repeat_rows
from shared.diffusion.sampling.sampler import Denoising, SamplingPlan, denoise
from shared.diffusion.weights.trained_weights import trained_parameters
from shared.errors import UserError
from shared.models.catalogue import (
    boundary,
    check_family,
    check_size,
    find_family,
    pipeline_sigmas,
    pixels_per_token,
    text_tokens,
)
from tests import tiny_models
from tests.shared.diffusion import ratio_error
from tests.tiny_pipelines import CLIP_TOKENS

CPU = torch.device("cpu")
SIZE = 32
SEEDS = [3, 4]
STEPS = 4
VIDEO, CFG = tiny_models.VIDEO, tiny_models.CFG
UNUSED = {
    "sd3": {"transformer_blocks.1.attn.add_q_proj"},
    "sd3-large": {"transformer_blocks.2.attn.add_q_proj"},
    "hunyuan-video15": {"transformer_blocks.1.attn.add_q_proj"},
}
"""The last block asks nothing of the text. Its layer stays adapted: left out, the demo's adapter
would be another one."""


@dataclass(frozen=True)
class Tiny:
    family: str
    pipeline: Any
    model: ModelAdapter
    folder: Path

    @property
    def frames(self) -> int:
        return 5 if self.family in VIDEO else 1

    @property
    def shape(self) -> tuple[int, ...]:
        return self.model.latent_shape(height=SIZE, width=SIZE, frames=self.frames)

    def encoded(self, guidance: float) -> Conditions:
        found: Conditions = tiny_models.encoded(self.family, self.model, guidance, SIZE)
        return found

    def theirs(self, start: Tensor, guidance: float, output: str) -> Tensor:
        """The pipeline's latents or pixels."""
        return tiny_models.run(
            self.family, self.pipeline, start, guidance=guidance, output=output,
            height=SIZE, width=SIZE, frames=self.frames, steps=STEPS,
        )  # fmt: skip


@pytest.fixture(scope="module", params=tiny_models.but_slow(tiny_models.FAMILIES))
def tiny(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    family = request.param
    folder = tiny_models.save(family, tmp_path_factory.mktemp(family))
    model = tiny_models.load(folder)
    return Tiny(family, tiny_models.build(family), model, folder)


def guidances(family: str) -> list[float]:
    return [1.0, 4.0] if family in CFG else [3.5]


def test_without_noise_the_sampler_is_the_pipeline(tiny: Tiny) -> None:
    for guidance in guidances(tiny.family):
        denoising = Denoising(
            SamplingPlan(sigmas=(1.0, 0.0), window=range(0)),
            seeds=SEEDS, shape=tiny.shape, device=CPU,
        )  # fmt: skip
        start = denoising.latents
        theirs = tiny.theirs(start, guidance, "latent")
        sigmas = tuple(tiny.pipeline.scheduler.sigmas.tolist())
        ours = sampled(tiny, sigmas, guidance)
        largest = max(1.0, float(theirs.abs().max()))  # float32 rounds in proportion to it
        assert float((ours - theirs).abs().max()) <= 2e-6 * largest, (tiny.family, guidance)
        pixels = torch.as_tensor(tiny.theirs(start, guidance, "pt"))
        torch.testing.assert_close(tiny.model.decode(ours), pixels, rtol=0, atol=1e-5)


def sampled(tiny: Tiny, sigmas: tuple[float, ...], guidance: float) -> Tensor:
    plan, model, shape = SamplingPlan(sigmas=sigmas, window=range(0)), tiny.model, tiny.shape
    conditions = repeat_rows(tiny.encoded(guidance), len(SEEDS))
    with torch.no_grad():
        return denoise(
            lambda latents, sigma: model.velocity(latents, sigma, conditions, guidance=guidance),
            Denoising(plan, seeds=SEEDS, shape=shape, device=CPU),
        )


def test_the_decoder_stays_in_float32_beside_a_network_in_bfloat16(tiny: Tiny) -> None:
    half = tiny_models.load(tiny.folder, dtype=torch.bfloat16)
    assert {each.dtype for each in half.transformer.parameters()} >= {torch.bfloat16}
    latents = torch.randn(2, *tiny.shape, generator=torch.Generator().manual_seed(0))
    assert torch.equal(half.decode(latents), tiny.model.decode(latents))


@pytest.mark.parametrize("trained", ["lora", "full"])
def test_a_replay_has_the_ratio_one_in_any_batch(
    trained: ratio_error.Trained, tiny: Tiny, tmp_path: Path
) -> None:
    found = ratio_error.measure(tiny.family, tmp_path, trained, torch.float32)
    assert len(found) == len(guidances(tiny.family)) * len(ratio_error.ROWS)
    assert max(found.values()) <= 1e-6, found


def test_every_layer_that_lora_adapts_has_a_gradient(tmp_path: Path, tiny: Tiny) -> None:
    folder = tiny_models.save(tiny.family, tmp_path)
    model = load_model(folder, {"transformer"}, device=CPU, dtype=torch.float32)
    tiny_models.add_lora(model)
    parameters = trained_parameters(model.transformer)
    for name, parameter in parameters.items():  # B is zero at first, and A then has no gradient
        if "lora_B" in name:
            torch.nn.init.normal_(parameter)
    guidance = guidances(tiny.family)[-1]
    conditions = repeat_rows(tiny.encoded(guidance), 2)
    latents = torch.randn(2, *tiny.shape, generator=torch.Generator().manual_seed(0))
    velocity = model.velocity(latents, torch.tensor([0.9, 0.4]), conditions, guidance=guidance)
    velocity.square().mean().backward()
    without = {
        name.split(".lora_")[0]
        for name, each in parameters.items()
        if each.grad is None or not each.grad.any()
    }
    assert parameters and without == UNUSED.get(tiny.family, set())
    assert not any("refiner" in name for name in parameters)


def test_the_pipeline_s_own_sigmas_are_read_from_its_folder(tmp_path: Path, tiny: Tiny) -> None:
    folder = tiny_models.save(tiny.family, tmp_path)
    start = torch.randn(1, *tiny.shape, generator=torch.Generator().manual_seed(0))
    tiny.theirs(start, 1.0, "latent")
    theirs = tiny.pipeline.scheduler.sigmas.tolist()
    ours = pipeline_sigmas(folder, STEPS, height=SIZE, width=SIZE, frames=tiny.frames)
    assert list(ours) == pytest.approx(theirs, abs=2e-6)


def test_a_size_that_the_model_cannot_make_is_refused_with_the_nearest(tiny: Tiny) -> None:
    with pytest.raises(UserError, match=r"model.height: 40 .* of 16; nearest is (32|48)$"):
        tiny.model.latent_shape(height=40, width=SIZE, frames=tiny.frames)
    if tiny.family in VIDEO:
        with pytest.raises(UserError, match=r"model.frames: 7 .*nearest are 5 and 9"):
            tiny.model.latent_shape(height=SIZE, width=SIZE, frames=7)


def test_shapes_are_those_of_the_pipeline(tiny: Tiny) -> None:
    theirs = tiny_models.latent_shape(tiny.family, tiny.pipeline, SIZE, SIZE, tiny.frames)
    assert tiny.shape == theirs
    family, config = find_family(tiny.folder), tiny.pipeline.transformer.config
    encoded = tiny.encoded(1.0)
    tokens = encoded["text"].shape[1] - (CLIP_TOKENS if "sd3" in tiny.family else 0)
    encoded_shapes = {name: tuple(tensor.shape[1:]) for name, tensor in encoded.items()}
    image_shapes = family.image_shapes
    of_image = {} if image_shapes is None else image_shapes(config, tiny.shape)
    assert {**family.condition_shapes(config, tokens), **of_image} == encoded_shapes


def test_tokens_are_packed_as_the_pipelines_do() -> None:
    from diffusers import FluxPipeline

    latents = torch.randn(2, 4, 6, 8, generator=torch.Generator().manual_seed(0))
    assert torch.equal(pack(latents), FluxPipeline._pack_latents(latents, 2, 4, 6, 8))
    assert torch.equal(unpack(pack(latents), 6, 8), latents)


def test_checkpointed_blocks_give_the_same_gradient(tmp_path: Path, tiny: Tiny) -> None:
    folder = tiny_models.save(tiny.family, tmp_path)
    guidance = guidances(tiny.family)[-1]
    conditions = repeat_rows(tiny.encoded(guidance), 2)
    latents = torch.randn(2, *tiny.shape, generator=torch.Generator().manual_seed(0))
    recomputed = 0

    def gradient(*, checkpointed: bool) -> dict[str, Tensor]:
        nonlocal recomputed
        model = load_model(folder, {"transformer"}, device=CPU, dtype=torch.float32)
        tiny_models.add_lora(model)
        if checkpointed:
            model.transformer.enable_gradient_checkpointing()  # type: ignore[operator]

        def count(*_: object) -> None:
            nonlocal recomputed
            recomputed += 1

        for name, module in model.transformer.named_modules():
            if re.fullmatch(
                r"(transformer(_2)?\.)?(single_)?(transformer_)?blocks\.0|layers\.0", name
            ):
                module.register_forward_pre_hook(count)
        sigma = torch.tensor([0.9, 0.3])
        model.velocity(latents, sigma, conditions, guidance=guidance).square().sum().backward()
        parameters = trained_parameters(model.transformer)
        return {name: p.grad for name, p in parameters.items() if p.grad is not None}

    kept = gradient(checkpointed=False)
    num_kept, recomputed = recomputed, 0
    again = gradient(checkpointed=True)
    assert recomputed == 2 * num_kept > 0
    assert kept.keys() == again.keys() and len(kept) > 0
    for name, tensor in kept.items():
        torch.testing.assert_close(again[name], tensor, rtol=1e-5, atol=1e-7)


def test_sizes_are_refused_before_anything_is_loaded(tiny: Tiny) -> None:
    multiple = pixels_per_token(tiny.folder)
    assert multiple == tiny_models.pixels_per_token(tiny.family, tiny.pipeline)
    check_size(tiny.folder, "evaluation", height=SIZE, width=multiple)
    with pytest.raises(UserError, match=rf"evaluation\.width: {SIZE + 1} is not .* is {SIZE}"):
        check_size(tiny.folder, "evaluation", height=SIZE, width=SIZE + 1)


def test_a_text_is_cut_off_where_the_recipe_says(tiny: Tiny) -> None:
    default, most = find_family(tiny.folder).text_tokens, find_family(tiny.folder).max_text_tokens
    assert text_tokens(tiny.folder, None) == default
    with pytest.raises(UserError, match=rf"model\.text_tokens: {most + 1} .* at most {most}"):
        text_tokens(tiny.folder, most + 1)
    short = tiny_models.load(tiny.folder, max_text_tokens=5)
    prompt = "a handwritten five and a long tail of words"
    text = tiny_models.encoded(tiny.family, short, 1.0, SIZE, prompt)["text"]
    before = short.pipeline.tokenizer.model_max_length if "sd3" in tiny.family else 0  # CLIP's
    assert text.shape[1] == before + 5


def described(tiny: Tiny, folder: Path) -> Path:
    """What a model folder says of itself, without weights."""
    for said in (tiny.folder / "model_index.json", *tiny.folder.glob("transformer*/config.json")):
        file = folder / said.relative_to(tiny.folder)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(said.read_bytes())
    return folder


def with_keys(file: Path, keys: dict[str, Any]) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), **keys}))


def test_a_part_that_the_adapter_would_leave_out_is_refused(tiny: Tiny, tmp_path: Path) -> None:
    folder = described(tiny, tmp_path)
    assert check_family(folder) == find_family(tiny.folder)
    second = {"some_encoder": ["transformers", "SomeEncoder"], "expand_timesteps": True}
    with_keys(folder / "model_index.json", second)
    with pytest.raises(UserError) as refused:
        load_model(folder, {"transformer"}, device=CPU, dtype=torch.float32)
    said = str(refused.value)
    assert "some_encoder" in said and "expand_timesteps = true" in said and "\n" not in said
    with_keys(
        folder / "model_index.json", {"some_encoder": [None, None], "expand_timesteps": False}
    )
    assert check_family(folder) == find_family(tiny.folder)


def test_a_second_network_is_known_with_a_boundary_and_of_the_same_kind(
    tiny: Tiny, tmp_path: Path
) -> None:
    folder = described(tiny, tmp_path)
    index, second = folder / "model_index.json", folder / "transformer_2" / "config.json"
    second.parent.mkdir(exist_ok=True)
    second.write_bytes((folder / "transformer" / "config.json").read_bytes())
    with_keys(index, {"transformer_2": ["diffusers", "Network"], "boundary_ratio": 0.9})
    if not find_family(folder).has_experts:
        with pytest.raises(UserError, match=r"transformer_2, boundary_ratio = 0\.9, which"):
            check_family(folder)
        return
    assert check_family(folder) == find_family(tiny.folder) and boundary(folder) == 0.9
    with_keys(second, {"num_layers": 17})
    with pytest.raises(UserError, match=r"the two networks of .* have another num_layers"):
        check_family(folder)
    for without in ({"boundary_ratio": None}, {"transformer_2": [None, None]}):
        with_keys(index, {"transformer_2": ["a", "b"], "boundary_ratio": 0.9} | without)
        with pytest.raises(UserError, match="two networks need a boundary between 0 and 1"):
            check_family(folder)


def test_a_network_with_a_switch_that_the_adapter_does_not_know_is_refused(
    tiny: Tiny, tmp_path: Path
) -> None:
    folder = described(tiny, tmp_path)
    networks = list(folder.glob("transformer*/config.json"))
    for network in networks:
        with_keys(network, {"zero_cond_t": False, "pos_embed_seq_len": None})
    assert check_family(folder) == find_family(tiny.folder)
    for network in networks:
        with_keys(network, {"zero_cond_t": True, "pos_embed_seq_len": 514})
    with pytest.raises(UserError, match=r"zero_cond_t = true.*does not know"):
        check_family(folder)
    with pytest.raises(UserError, match=r"pos_embed_seq_len = 514"):
        check_family(folder)
