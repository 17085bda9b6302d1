"""A family that is added as CONTRIBUTING.md says: its adapter, and its entry in the table."""

import json
from collections.abc import Callable
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

import pytest
import torch

from shared.diffusion.families.flux import Flux
from shared.diffusion.loading.models import load_model, repeat_rows
from shared.diffusion.sampling.sampler import Denoising, SamplingPlan, denoise
from shared.errors import UserError
from shared.models import families
from shared.models.catalogue import check_size, pipeline_sigmas, pixels_per_token
from shared.models.families import FamilySpec
from shared.models.sigmas import shift_by_tokens
from tests import tiny_models

SIZE, STEPS, GUIDANCE = 256, 4, 3.5
CPU = torch.device("cpu")
FLUX_SCHEDULER = {
    "base_image_seq_len": 256, "base_shift": 0.5, "max_image_seq_len": 4096, "max_shift": 1.15,
    "shift": 3.0, "use_dynamic_shifting": True,
}  # fmt: skip


class Orchid(Flux):
    """The adapter of the new family, whose network is FLUX's."""


ENTRY: dict[str, Any] = {
    "pipeline": "OrchidPipeline",
    "adapter": f"{__name__}:Orchid",
    "components": frozenset({"text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2"}),
    "network_keys": families.FAMILIES["FluxPipeline"].network_keys,
    "sigmas": shift_by_tokens,
    "packed": True,
    "decoder_factor": lambda decoder: 2 ** (len(decoder["block_out_channels"]) - 1),
    "text_tokens": 512,
    "max_text_tokens": 512,
    "condition_shapes": lambda network, tokens: {
        "text": (tokens, network["joint_attention_dim"]),
        "pooled": (network["pooled_projection_dim"],),
    },
    "embeds_guidance": True,
    "lora_targets": families.JOINT_ATTENTION,
    "native_layers": {},
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model of the new family, with the configuration of FLUX's noise schedule."""
    import diffusers

    class OrchidPipeline(diffusers.FluxPipeline):  # type: ignore[misc]
        pass

    monkeypatch.setattr(diffusers, "OrchidPipeline", OrchidPipeline, raising=False)
    monkeypatch.setitem(families.FAMILIES, "OrchidPipeline", FamilySpec(**ENTRY))
    tiny_models.save("flux", tmp_path)
    change(tmp_path / "model_index.json", _class_name="OrchidPipeline")
    change(tmp_path / "scheduler/scheduler_config.json", **FLUX_SCHEDULER)
    return tmp_path


def change(file: Path, **keys: Any) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), **keys}))


def test_it_samples_at_the_sigmas_of_its_own_pipeline(folder: Path) -> None:
    import diffusers

    sigmas = pipeline_sigmas(folder, STEPS, height=SIZE, width=SIZE, frames=1)
    model = load_model(folder, {"transformer", "text", "decoder"}, device=CPU, dtype=torch.float32)
    assert isinstance(model, Orchid)
    conditions = repeat_rows(model.encode(tiny_models.PROMPT, guidance=GUIDANCE), 1)
    start = Denoising(
        SamplingPlan(sigmas=sigmas, window=range(0)), seeds=[3],
        shape=model.latent_shape(height=SIZE, width=SIZE), device=CPU,
    )  # fmt: skip
    noise = start.latents
    with torch.no_grad():
        ours = denoise(
            lambda latents, sigma: model.velocity(latents, sigma, conditions, guidance=GUIDANCE),
            start,
        )
    pipeline = diffusers.OrchidPipeline.from_pretrained(folder, local_files_only=True)
    pipeline.set_progress_bar_config(disable=True)
    theirs = tiny_models.run(
        "flux", pipeline, noise, guidance=GUIDANCE, output="latent",
        height=SIZE, width=SIZE, frames=1, steps=STEPS,
    )  # fmt: skip
    assert list(sigmas) == pytest.approx(pipeline.scheduler.sigmas.tolist(), abs=2e-6)
    assert [round(sigma, 3) for sigma in sigmas] == [1.0, 0.832, 0.622, 0.355, 0.0]
    assert float((ours - theirs).abs().max()) <= 2e-6


def test_its_sizes_are_multiples_of_a_packed_token(folder: Path) -> None:
    assert pixels_per_token(folder) == 16
    check_size(folder, "model", height=SIZE, width=SIZE)
    with pytest.raises(UserError, match=r"model\.height: 40 is not a multiple of 16"):
        check_size(folder, "model", height=40, width=SIZE)


@pytest.mark.parametrize("name", [f.name for f in fields(FamilySpec) if f.default is MISSING])
def test_an_answer_that_is_missing_is_an_error_that_names_it(name: str) -> None:
    with pytest.raises(TypeError, match=rf"missing 1 required keyword-only argument: '{name}'"):
        FamilySpec(**{key: answer for key, answer in ENTRY.items() if key != name})


@pytest.mark.parametrize(
    "ask", [pixels_per_token, lambda f: pipeline_sigmas(f, 4, height=64, width=64, frames=1)]
)
def test_a_decoder_that_does_not_say_its_factor_is_refused_in_one_line(
    folder: Path, ask: Callable[[Path], object]
) -> None:
    file = folder / "vae/config.json"
    plain = json.loads(file.read_text())
    del plain["block_out_channels"]
    file.write_text(json.dumps(plain))
    with pytest.raises(UserError, match=r"model\.folder: .*config\.json has no block_out_channels"):
        ask(folder)


def test_a_pipeline_without_an_entry_has_no_sigmas(folder: Path) -> None:
    change(folder / "model_index.json", _class_name="IrisPipeline")
    with pytest.raises(UserError, match=r"holds a IrisPipeline; supported are: .*OrchidPipeline"):
        pipeline_sigmas(folder, STEPS, height=SIZE, width=SIZE, frames=1)
