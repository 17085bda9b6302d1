"""What is done to the blocks of a network: activations that are computed again, and compilation."""

import itertools
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from structlog.testing import capture_logs
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from shared.diffusion.families.base import Family
from shared.diffusion.loading.compilation import TIMINGS, compile_blocks
from shared.diffusion.loading.models import ModelAdapter, repeat_rows
from shared.diffusion.loading.recomputation import KERNELS, checkpoint_blocks
from shared.diffusion.policy import LoadedPolicy, load_policy
from shared.diffusion.weights.trained_weights import trained_parameters
from shared.recipe.recipe import override
from tests import tiny_models
from tests.shared.diffusion.digits import RECIPE

SIZE = 32
TEXT_REFINED = ("hunyuan-video", "hunyuan-video15", "z-image")
OLD_WORDS = pytest.mark.filterwarnings("ignore::DeprecationWarning:torch.*")
"""Torch's compiler uses what torch advises against."""
NO_LEAVES = pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")
"""Torch's compiler asks tensors between blocks for a gradient."""


@pytest.fixture(scope="module", params=tiny_models.but_slow(["flux"]))
def family(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(scope="module")
def folder(family: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.save(family, tmp_path_factory.mktemp(family))


def load(folder: Path) -> Family:
    made = tiny_models.load(folder)
    tiny_models.add_lora(made)
    return made


@pytest.fixture(autouse=True)
def nothing_compiled_before() -> None:
    torch._dynamo.reset()


class Kernels(TorchDispatchMode):
    """Counts calls of torch's fused attention, backward passes aside."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        self.calls += func.name().removeprefix("aten::") in KERNELS
        return func(*args, **(kwargs or {}))


def counted_gradient(family: str, model: Family) -> tuple[dict[str, Tensor], int]:
    """The gradient, and the calls of attention that it took."""
    kernels = Kernels()  # under which nothing is compiled
    return gradient(family, model, kernels), kernels.calls


def gradient(
    family: str, model: ModelAdapter, beside: AbstractContextManager[object] | None = None
) -> dict[str, Tensor]:
    frames = 5 if family in tiny_models.VIDEO else 1
    shape = model.latent_shape(height=SIZE, width=SIZE, frames=frames)
    latents = torch.randn(2, *shape, generator=torch.Generator().manual_seed(0))
    told = repeat_rows(tiny_models.encoded(family, model, 4.0, SIZE), 2)
    model.transformer.zero_grad(set_to_none=True)
    with beside or nullcontext():
        found = model.velocity(latents, torch.tensor([0.9, 0.3]), told, guidance=4.0)
        found.square().sum().backward()
    parameters = trained_parameters(model.transformer)
    return {n: p.grad for n, p in parameters.items() if p.grad is not None}


def test_what_is_computed_again_changes_no_bit_of_the_gradient(family: str, folder: Path) -> None:
    kept, calls = counted_gradient(family, load(folder))
    assert calls > 0 and kept
    wanted = {True: 2, "selective": 1}
    for keeping in (True, "selective"):
        model = load(folder)
        checkpoint_blocks(model.transformer, keeping)
        found, again = counted_gradient(family, model)
        assert found.keys() == kept.keys()
        assert all(torch.equal(found[name], kept[name]) for name in kept), keeping
        outside = 2 if family in TEXT_REFINED else 0  # what refines a text has no gradient
        assert abs(again - wanted[keeping] * calls) <= outside * wanted[keeping], keeping


@OLD_WORDS
@NO_LEAVES
def test_compiled_blocks_compute_the_same_bits(family: str, folder: Path) -> None:
    wanted = gradient(family, load(folder))
    model = load(folder)
    blocks = compile_blocks(model.transformer, backend="aot_eager")
    found = gradient(family, model)
    assert blocks.reason is None and blocks.blocks
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


@torch.no_grad()
def velocity(policy: LoadedPolicy) -> Tensor:
    config: Any = policy.model.transformer.config
    told = {
        "text": torch.zeros(1, 4, config.joint_attention_dim),
        "pooled": torch.zeros(1, config.pooled_projection_dim),
    }
    latents = torch.zeros(1, 1, 8, 8)
    return policy.model.velocity(latents, torch.ones(1), told, guidance=1.0)


@OLD_WORDS
def test_blocks_that_cannot_be_compiled_run_as_they_are_and_the_log_says_why() -> None:
    def broken(graph: Any, inputs: Any) -> Any:
        raise ValueError("no such instruction")

    policy = load_policy(RECIPE, {"transformer"})
    blocks = compile_blocks(policy.model.transformer, backend=broken)  # type: ignore[arg-type]
    with capture_logs() as logs:
        for _ in range(2):
            velocity(policy)
    [said] = [each for each in logs if each["event"] == "not_compiled"]
    assert "no such instruction" in said["reason"] and blocks.reason == said["reason"]
    assert all(block._compiled_call_impl is None for block in blocks.blocks)


@OLD_WORDS
@pytest.mark.parametrize(("compiled_s", "gains"), [(0.5, True), (0.99, False)])
def test_a_trial_compiles_all_blocks_where_one_is_faster(compiled_s: float, gains: bool) -> None:
    policy = load_policy(RECIPE, {"transformer"})
    seconds = [s for each in (1.0, compiled_s) for s in (99.0, *[each] * TIMINGS)]
    times = itertools.accumulate(seconds)
    blocks = compile_blocks(policy.model.transformer, backend="eager", trial_by=lambda: next(times))
    with capture_logs() as logs:
        found = [velocity(policy) for _ in range(2)]
    assert torch.equal(*found)
    [tried] = [each for each in logs if each["event"] == "compilation_tried"]
    assert (tried["plain_s"], tried["compiled_s"]) == (1.0, compiled_s)
    assert (blocks.reason is None) == gains
    replaced = [each._compiled_call_impl is not None for each in blocks.blocks]
    assert replaced == [gains] * len(blocks.blocks)


@OLD_WORDS
def test_a_recipe_compiles_what_is_loaded() -> None:
    assert load_policy(RECIPE, {"transformer"}).compiled is None
    assert (
        load_policy(override(RECIPE, {"model.compile": "auto"}), {"transformer"}).compiled is None
    )
    policy = load_policy(override(RECIPE, {"model.compile": "regional"}), {"transformer"})
    assert policy.compiled is not None
    blocks = policy.compiled.blocks
    assert {id(each) for each in blocks} <= {id(m) for m in policy.model.transformer.modules()}
    assert all(block._compiled_call_impl is not None for block in blocks)
