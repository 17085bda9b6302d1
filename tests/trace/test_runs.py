"""A trace is what a run does, without values."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from digenrl.commands.cli import app
from digenrl.trace.fakes import CPU, num_bytes
from digenrl.trace.memory import member_needs, rollout_needs, trainer_needs, usual
from digenrl.trace.record import GIB, Trace, affine
from digenrl.trace.runs import trace, trace_setting
from services.trainer.engine.trainer_engine import TrainerEngine
from shared.diffusion.generation import Generator
from shared.diffusion.loading.models import load_model
from shared.diffusion.sampling.tensors import unpack
from shared.errors import UserError
from shared.models.memory import WeightsHolding, weight_bytes
from shared.models.published import PUBLISHED, find_configuration
from shared.recipe.recipe import Recipe, load_recipe, override, with_folder
from tests import tiny_models
from tests.paths import DIGITS
from tests.shared.diffusion.digits import load_digits, task

FRAGMENT = 4
SIZES = {"model.height": 32, "model.width": 32, "model.dtype": "bfloat16"}
HEADER = 4096
"""Most bytes of a stored object that are no tensor."""


def traced(recipe: Recipe) -> Trace:
    return trace(recipe, trace_setting(recipe, FRAGMENT), is_published=False, say=lambda _: None)


@pytest.fixture(scope="module")
def digits() -> Trace:
    return traced(load_recipe(DIGITS))


@pytest.mark.slow
def test_a_trace_holds_and_stores_what_the_run_does(digits: Trace) -> None:
    recipe, weights, stored = load_recipe(DIGITS), digits.weights, digits.stored
    folder, dtype = recipe.model.folder, recipe.model.dtype
    assert weights.network == weight_bytes(folder, dtype, {"transformer"})
    assert weights.decoder == weight_bytes(folder, dtype, {"decoder"})
    assert sum(weights.text.values()) == weight_bytes(folder, dtype, {"text"})
    policy = load_digits()
    generator = Generator(recipe, policy)
    generated = generator.generate(task(num_samples=FRAGMENT))
    assert stored.media * FRAGMENT == unpack(generated.media)["images"].nbytes
    assert stored.trajectory == pytest.approx(len(generated.trajectory) / FRAGMENT, abs=HEADER)
    assert stored.conditions >= len(generator.conditions("a handwritten three"))  # of full length
    engine = TrainerEngine(recipe, policy)
    engine.step(0)
    held = [s.nbytes for each in engine._optimizer.state.values() for s in each.values()]
    assert digits.training.optimizer == sum(held)
    assert stored.weights == digits.training.gradients == weights.trained


@pytest.mark.slow
def test_a_quantised_base_is_held_in_fewer_bytes_and_computes_as_much(digits: Trace) -> None:
    found = traced(override(load_recipe(DIGITS), {"model.weights": "int8"}))
    folder, dtype = load_recipe(DIGITS).model.folder, "float32"
    held = weight_bytes(folder, dtype, {"transformer"}, WeightsHolding("int8"))
    assert found.weights.network - found.weights.saved == held < digits.weights.network
    assert found.memory(fragment=FRAGMENT).network_gib == pytest.approx(
        digits.memory(fragment=FRAGMENT).network_gib
    )
    for ours, plain in zip(found.training.passes, digits.training.passes, strict=True):
        assert (ours.forward, ours.kl) == (plain.forward, plain.kl)
        assert ours.launches > plain.launches


def test_peaks_and_arithmetic_grow_with_rows(digits: Trace) -> None:
    one, fragment = digits.denoise
    assert (one.rows, fragment.rows) == (1, FRAGMENT)
    assert one.peak_bytes < fragment.peak_bytes < FRAGMENT * one.peak_bytes * 1.1
    assert fragment.flops["float32"] == FRAGMENT * one.flops["float32"]
    assert digits.denoise_peak(FRAGMENT) == fragment.peak_bytes
    small, large = digits.training.passes
    assert large.rows == 2 * small.rows and large.flops == 2 * small.flops
    assert digits.training.peak_bytes(large.rows) == pytest.approx(large.peak_bytes)
    assert 2 < digits.rho < 4
    assert Trace.model_validate_json(digits.model_dump_json()) == digits


@pytest.mark.slow
def test_inputs_of_blocks_that_are_offloaded_are_counted_on_the_host() -> None:
    kept, offloaded = (
        traced(override(load_recipe(DIGITS), {"trainer.gradient_checkpointing": keeping}))
        for keeping in (True, "offloaded")
    )
    before, after = (each.training.passes[-1] for each in (kept, offloaded))
    assert before.offloaded_bytes == 0 < after.offloaded_bytes
    assert after.flops == before.flops
    assert before.peak_bytes - after.offloaded_bytes <= after.peak_bytes <= before.peak_bytes
    memory = offloaded.memory(fragment=FRAGMENT)
    used = replace(usual(memory), rows=after.rows, offloads=True, item_bytes=4)
    needed = trainer_needs(memory, used)
    assert needed.peak == pytest.approx(after.peak_bytes / GIB, rel=1e-6)
    assert needed.host == pytest.approx(after.offloaded_bytes / GIB)


@pytest.mark.slow
def test_a_profile_s_arithmetic_gives_back_what_was_traced(digits: Trace) -> None:
    memory, weights = digits.memory(fragment=FRAGMENT), digits.weights
    training = digits.training
    last = training.passes[-1]
    use = replace(usual(memory), item_bytes=4, fragment=FRAGMENT, rows=last.rows)
    held = weights.network + sum(weights.text.values()) + weights.decoder
    generates, member = rollout_needs(memory, use), member_needs(memory, use)
    work = max(digits.denoise[-1].peak_bytes, digits.decode.peak_bytes)
    assert generates.total * GIB == pytest.approx(held + 2 * weights.trained + work)
    sums = 2 * weights.trained  # a copy of its own, and the totals of all members
    held += weights.trained + training.optimizer + sums
    assert member.held * GIB == pytest.approx(held, rel=1e-3)  # the optimizer counts its steps
    assert member.peak * GIB == pytest.approx(max(last.peak_bytes, work + training.gradients))


def test_two_points_are_a_line_that_begins_above_zero() -> None:
    assert affine([(4, 50), (2, 30)]) == (10.0, 10.0)
    assert affine([(1, 10), (2, 30)]) == (0.0, 15.0)


@pytest.mark.slow
@pytest.mark.parametrize("family", tiny_models.FAMILIES)
def test_every_family_is_traced_by_its_json_files_alone(family: str, tmp_path: Path) -> None:
    whole = tiny_models.save(family, tmp_path / "whole")
    bare = tmp_path / "bare"
    for file in whole.rglob("*.json"):
        target = bare / file.relative_to(whole)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(file, target)
    frames = {"model.frames": 5} if family in tiny_models.VIDEO else {}
    recipe = override(load_recipe(DIGITS), {**SIZES, **frames})
    found = traced(with_folder(recipe, bare))
    loaded = load_model(whole, {"transformer"}, device=CPU, dtype=torch.bfloat16).transformer
    held = num_bytes([*loaded.parameters(), *loaded.buffers()])  # some are kept in float32
    assert found.weights.network == held
    assert sum(found.weights.text.values()) == weight_bytes(whole, "bfloat16", {"text"})
    assert found.weights.decoder == weight_bytes(whole, "bfloat16", {"decoder"})
    assert found.rho > 2


def test_a_folder_goes_before_what_is_published_of_its_name(tmp_path: Path) -> None:
    folder = tmp_path / "FLUX.1-dev"
    found = find_configuration(folder)
    assert found.is_published and found.folder == PUBLISHED / "flux1-dev"
    tiny_models.save("flux", folder)
    assert find_configuration(folder).folder == folder
    with pytest.raises(UserError, match=r"^model.folder: .*known are .*JSON files"):
        find_configuration(tmp_path / "sdxl")


@pytest.mark.slow
def test_check_traces_a_recipe_and_says_so() -> None:
    said = CliRunner().invoke(app, ["check", str(DIGITS), "--trace"], catch_exceptions=False)
    assert said.exit_code == 0
    rows = [line.split("  ")[0] for line in said.stdout.splitlines()]
    assert {"held, GiB", "beyond it, GiB", "TFLOP", "stored, GB"} <= set(rows)
    assert "training passes of" in said.stderr


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("trained", ["lora", "full"])
def test_a_rank_holds_its_share_of_the_network(digits: Trace, trained: str, dtype: str) -> None:
    ranks = {
        "schedule.mode": "fluid", "rollout.workers": 1, "algorithm.kl_beta": 0.0,
        "trainer.devices": 2, "trainer.shard_devices": 2,
    }  # fmt: skip
    changes = {**ranks, "model.trained": trained, "model.dtype": dtype}
    found = traced(override(load_recipe(DIGITS), changes))
    assert found.train is None and found.sharded is not None
    training, adapter = found.sharded.training, digits.weights.trained
    whole = digits.weights.network
    if trained == "lora":
        size = 1.0 if dtype == "float32" else 0.5
        assert found.sharded.network == pytest.approx(adapter + size * whole / 2, rel=0.05)
        assert training.optimizer == pytest.approx(2 * adapter, rel=0.02)
    else:  # float32 masters, and their moments
        assert found.sharded.network == pytest.approx(whole / 2, rel=0.05)
        assert training.optimizer == pytest.approx(whole, rel=0.05)
        assert training.gradients == pytest.approx(whole / 2, rel=0.05)
    small, large = training.passes
    assert large.flops == 2 * small.flops


@pytest.mark.slow
def test_all_weights_in_half_precision_have_masters(digits: Trace) -> None:
    changes = {"algorithm.kl_beta": 0.0, "model.trained": "full", "model.dtype": "bfloat16"}
    found = traced(override(load_recipe(DIGITS), changes))
    whole = digits.weights.network
    assert found.weights.network == whole / 2
    assert found.training.optimizer == pytest.approx(3 * whole, rel=0.02)
    assert found.training.gradients == pytest.approx(whole, rel=0.02)
