"""A network in fewer bits generates with the trainer's adapter, and not far from the trainer's."""

from pathlib import Path
from typing import Any

import pytest
import torch
from structlog.testing import capture_logs

from shared.diffusion.models import ModelAdapter
from shared.diffusion.quantisation import quantisation
from shared.diffusion.weights import WeightsInUse, trained_tensors, weights_digest
from shared.errors import UserError
from shared.models.memory import BLOCK, Form, Holding, weight_bytes
from tests import tiny_models
from tests.shared.diffusion import ratio_error
from tests.stored import staged

EVERY = tiny_models.but_slow(["sd3"])


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def loaded(family: str, folder: Path, form: Form | None) -> ModelAdapter:
    return ratio_error.load_moved(folder, "lora", torch.float32, Holding(form))


@pytest.mark.parametrize("family", EVERY)
def test_it_takes_the_trainers_adapter_and_the_bytes_that_are_said(
    family: str, tmp_path: Path
) -> None:
    tiny_models.save(family, tmp_path)
    trainer, rollout = (loaded(family, tmp_path, form) for form in (None, "int8"))
    tensors = trained_tensors(trainer.transformer)
    twice = staged(rollout.transformer, {name: 2 * t for name, t in tensors.items()})
    doubled = weights_digest({name: 2 * tensor for name, tensor in tensors.items()})
    assert WeightsInUse(rollout.transformer).adopt(twice) == doubled

    frozen = [p for p in rollout.transformer.parameters() if not p.requires_grad]
    held = sum(map(held_bytes, frozen))
    in_file = weight_bytes(tmp_path, "float32", ["transformer"], Holding("int8"))
    buffers = {b.nbytes for b in rollout.transformer.buffers()}
    assert in_file - held in {0, *buffers}, "a table of positions is in the file, and no weight"
    in_blocks = [
        parameter
        for name, parameter in rollout.transformer.named_parameters()
        if BLOCK.match(name) and not parameter.requires_grad
    ]
    as_trained = 4 * sum(parameter.numel() for parameter in in_blocks)
    assert sum(map(held_bytes, in_blocks)) < 0.6 * as_trained


def held_bytes(parameter: Any) -> int:
    parts = ("qdata", "scale", "zero_point")
    if hasattr(parameter, "qdata"):
        return sum(getattr(parameter, part).nbytes for part in parts)
    return int(parameter.nbytes)


@pytest.mark.parametrize("family", EVERY)
def test_its_ratio_to_the_trainers_network_is_near_one_and_not_rounding(
    family: str, tmp_path: Path
) -> None:
    ratios = ratio_error.ratios(family, tmp_path, torch.float32, "int8")
    error = float((ratios - 1).abs().max())
    assert 1e-8 < error < 1e-2
    assert torch.equal(ratio_error.ratios(family, tmp_path, torch.float32, None).round(decimals=5),
                       torch.ones_like(ratios))  # fmt: skip


@pytest.mark.parametrize(("form", "extra"), [("int8", "quantised"), ("nf4", "nf4")])
def test_a_missing_package_is_named_with_its_extra(
    form: Form, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shared.models.quantised.find_spec", lambda package: None)
    with pytest.raises(UserError, match=rf'^rollout\.weights: "{form}" needs the extra "{extra}"'):
        quantisation(form, ["transformer"], torch.bfloat16)


def test_nf4_without_a_gpu_is_refused_with_a_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shared.models.quantised.find_spec", lambda package: package)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UserError, match=r'^rollout\.weights: "nf4" needs a GPU; use "int8"'):
        quantisation("nf4", ["transformer"], torch.bfloat16)


def test_a_form_that_nobody_has_reported_on_says_so() -> None:
    with capture_logs() as lines:
        quantisation("fp8", ["transformer"], torch.bfloat16)
        quantisation("int8", ["transformer"], torch.bfloat16)
    assert [(line["event"], line["weights"]) for line in lines] == [("untested_weights", "fp8")]
