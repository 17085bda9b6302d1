"""Weights in fewer bits: what a layer computes with them, and what networks do under an adapter."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from shared.diffusion.loading.network import materialize
from shared.diffusion.loading.quantisation import (
    NF4_VALUES,
    QuantisedLinear,
    dequantised,
    quantised_layers,
)
from shared.diffusion.loading.recomputation import checkpoint_blocks
from shared.diffusion.weights.trained_weights import WeightsInUse, trained_tensors, weights_digest
from shared.models.memory import BLOCK, UNQUANTISED, Form, WeightsHolding, weight_bytes
from tests import tiny_models
from tests.shared.diffusion import ratio_error
from tests.shared.diffusion.test_blocks import gradient
from tests.stored import staged

EVERY = tiny_models.but_slow(["sd3"])
CPU = torch.device("cpu")


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def layer_of(form: Form, matrix: Tensor, bias: Tensor) -> QuantisedLinear:
    layer = nn.Linear(matrix.shape[1], len(matrix), dtype=matrix.dtype)
    layer.bias = nn.Parameter(bias, requires_grad=False)
    layer.__class__ = QuantisedLinear
    assert isinstance(layer, QuantisedLinear)
    layer.expect(form)
    materialize(layer, CPU)
    layer.hold(matrix)
    return layer


def weights_of(layer: QuantisedLinear) -> Tensor:
    return dequantised(layer.weight, layer.scale, layer.values, layer.form, layer.size)


def random(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape))).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("form", "error"), [("int8", 0.5 / 127), ("fp8", 2**-4), ("nf4", 0.152), ("w8a8", 0.5 / 127)]
)
def test_each_row_has_an_error_by_its_own_largest_weight(
    form: Form, error: float, dtype: torch.dtype
) -> None:
    matrix = random(9, 64, dtype=dtype)
    matrix[2] *= 1000
    matrix[5] = 0
    found = weights_of(layer_of(form, matrix, random(9, dtype=dtype)))
    largest = matrix.float().abs().amax(1, keepdim=True)
    rounding = torch.finfo(dtype).eps
    assert bool(((found.float() - matrix.float()).abs() <= (error + rounding) * largest).all())
    assert not torch.equal(found, matrix)


def test_nf4_has_the_published_values_in_matrices_of_any_size() -> None:
    matrix = torch.tensor(NF4_VALUES[1:]).view(3, 5)
    assert torch.equal(weights_of(layer_of("nf4", matrix, random(3))), matrix)


@pytest.mark.parametrize("form", ["int8", "fp8", "nf4"])
def test_product_and_gradient_are_those_of_the_weights_that_the_codes_stand_for(form: Form) -> None:
    bias = random(24)
    layer = layer_of(form, random(24, 40), bias)
    given, same = (random(2, 7, 40).requires_grad_() for _ in range(2))
    found, wanted = layer(given), functional.linear(same, weights_of(layer), bias)
    assert torch.equal(found, wanted)
    found.square().sum().backward()
    wanted.square().sum().backward()
    assert given.grad is not None and same.grad is not None
    assert torch.equal(given.grad, same.grad)


@torch.no_grad()
def test_w8a8_quantises_the_rows_of_its_input_where_a_gpu_multiplies_integers() -> None:
    matrix, bias = random(24, 40), random(24)
    both, weights = (layer_of(form, matrix, bias) for form in ("w8a8", "int8"))
    many, few = random(2, 9, 40), random(1, 16, 40)
    many[0, 0] *= 1000
    exact = weights(many)
    error = (both(many) - exact).norm(dim=-1) / exact.norm(dim=-1)
    assert 1e-4 < float(error.max()) < 2e-2
    assert torch.equal(both(few), weights(few))


@torch.no_grad()
def copy_base(quantised: nn.Module, plain: nn.Module) -> None:
    """Gives a network the weights that the codes of another stand for."""
    for name, layer in quantised_layers(quantised).items():
        plain.get_submodule(name).weight.copy_(weights_of(layer))  # type: ignore


@pytest.mark.parametrize("form", ["int8", "nf4"])
@pytest.mark.parametrize("family", EVERY)
def test_a_network_takes_the_trainers_adapter_and_the_bytes_that_are_said(
    family: str, form: Form, tmp_path: Path
) -> None:
    trainer, rollout = ratio_error.each_held(family, tmp_path, UNQUANTISED, WeightsHolding(form))
    tensors = trained_tensors(trainer.transformer)
    twice = staged(rollout.transformer, {name: 2 * t for name, t in tensors.items()})
    doubled = weights_digest({name: 2 * tensor for name, tensor in tensors.items()})
    assert WeightsInUse(rollout.transformer).adopt(twice) == doubled

    frozen = {n: p for n, p in rollout.transformer.named_parameters() if not p.requires_grad}
    held = sum(each.nbytes for each in frozen.values())
    in_file = weight_bytes(tmp_path, "float32", ["transformer"], WeightsHolding(form))
    buffers = {b.nbytes for b in rollout.transformer.buffers()}
    assert in_file - held in {0, *buffers}, "a table of positions is in the file, and no weight"
    in_blocks = sum(each.nbytes for name, each in frozen.items() if BLOCK.match(name))
    whole = dict(trainer.transformer.named_parameters())
    as_trained = sum(whole[n].nbytes for n in frozen if n in whole and BLOCK.match(n))
    assert in_blocks < 0.6 * as_trained


@pytest.mark.parametrize("form", ["int8", "nf4"])
@pytest.mark.parametrize("family", EVERY)
def test_a_base_generates_and_trains_as_the_network_of_its_weights(
    family: str, form: Form, tmp_path: Path
) -> None:
    base, plain = ratio_error.each_held(family, tmp_path, WeightsHolding(form), UNQUANTISED)
    assert any(name.endswith(".base_layer") for name in quantised_layers(base.transformer))
    copy_base(base.transformer, plain.transformer)
    checkpoint_blocks(base.transformer, True)
    found, wanted = (gradient(family, each) for each in (base, plain))
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-5, atol=1e-7)
    ratios = ratio_error.own_ratios(family, base)
    assert max(float((each - 1).abs().max()) for each in ratios.values()) <= 1e-6


@pytest.mark.parametrize("form", ["int8", "w8a8"])
@pytest.mark.parametrize("family", EVERY)
def test_its_ratio_to_the_trainers_network_is_near_one_and_not_rounding(
    family: str, form: Form, tmp_path: Path
) -> None:
    ratios = ratio_error.ratios(family, tmp_path, torch.float32, form)
    error = float((ratios - 1).abs().max())
    assert 1e-8 < error < 1e-2
    assert torch.equal(ratio_error.ratios(family, tmp_path, torch.float32, None).round(decimals=5),
                       torch.ones_like(ratios))  # fmt: skip
