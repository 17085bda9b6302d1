"""Samples of a group that begin at one noise: what is computed once gives what each alone would."""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from shared.devices.chunks import Chunk
from shared.devices.protocols import GroupData
from shared.devices.slices import GroupSlice, slice_group
from shared.diffusion.generation import Generator
from shared.diffusion.models import Conditions, repeat_rows
from shared.diffusion.policy import LoadedPolicy, load_policy, sampling_plan
from shared.diffusion.sampler import Denoising, SamplingPlan, Trajectory, denoise
from shared.diffusion.tensors import pack, unpack, unpack_trajectory
from shared.diffusion.training.gradient import GradientTransaction
from shared.diffusion.training.group import PathGroup, TransitionRows, read_paths
from shared.diffusion.transition import transition
from shared.diffusion.weights import load_weights, trained_parameters, trained_tensors
from shared.errors import ContractError
from shared.learning.seeds import group_seed, sample_seed
from shared.messages.contracts import Fragment, GenerateFragment, Policy, Prompt
from shared.models.sigmas import linear_sigmas
from shared.recipe.recipe import Recipe, load_recipe, override
from tests import tiny_models
from tests.paths import DIGITS
from tests.tiny_models import PROMPT

CPU = torch.device("cpu")
SAMPLES, START, WINDOW, STEPS = 4, 1, 2, 5
TOLERANCE = {"float32": 1e-5, "float64": 1e-10}
SEED_OF_UNLIKE = 4
"""Some of its samples draw the first step, and others do not."""
ADVANTAGES = (1.5, -0.5, 0.0, -1.25)


@dataclass(frozen=True)
class Tiny:
    recipe: Recipe
    policy: LoadedPolicy

    def fragment(self, first: int = 0, size: int = SAMPLES, **changes: Any) -> bytes:
        """A fragment of the group 3 as rollout stores it."""
        task = GenerateFragment(
            fragment=Fragment(batch=2, group=3, first_sample=first, num_samples=size),
            policy=Policy(version=0, weights_digest="0" * 64),
            prompt=Prompt(text=PROMPT),
            window_start=START,
            worker="w",
        )
        return Generator(override(self.recipe, changes), self.policy).generate(task).trajectory

    def group(self, *fragments: bytes, staleness: int = 0) -> PathGroup:
        data = GroupData(
            trajectories=fragments,
            conditions=Generator(self.recipe, self.policy).conditions(PROMPT),
            advantages=ADVANTAGES,
            staleness=staleness,
        )
        return read_paths(self.recipe, data)

    def gradient(
        self, group: PathGroup, chunk: Chunk
    ) -> tuple[dict[str, Tensor], dict[str, float], list[int]]:
        """The group's gradient, its metrics, and the rows of the network's passes."""
        transaction = GradientTransaction.of(self.recipe, self.policy.model)
        transaction.begin()
        is_wide = self.recipe.model.dtype == "float64"
        with passes(self.policy) as rows, Wide() if is_wide else nullcontext():
            transaction.accumulate(group, chunk)
        parameters = trained_parameters(self.policy.model.transformer)
        found = {name: p.grad.clone() for name, p in parameters.items() if p.grad is not None}
        return found, transaction.metrics(), rows


class Wide(TorchFunctionMode):
    """Keeps float64 where a network's layers go over to float32: some of all families do."""

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        found = func(*args, **(kwargs or {}))
        if func not in (Tensor.float, Tensor.to) or found.dtype is not torch.float32:
            return found
        return args[0] if args[0].dtype is torch.float64 else found


@contextmanager
def passes(policy: LoadedPolicy) -> Iterator[list[int]]:
    """Notes the rows of each call of a model, with its gradient or without."""
    rows: list[int] = []
    model: Any = policy.model
    velocity = model.velocity

    def noted(latents: Tensor, sigma: Tensor, conditions: Conditions, **given: Any) -> Tensor:
        assert {len(each) for each in conditions.values()} == {len(latents)} == {len(sigma)}
        rows.append(len(latents))
        found: Tensor = velocity(latents, sigma, conditions, **given)
        return found

    model.velocity = noted
    try:
        yield rows
    finally:
        del model.velocity


def load(family: str, folder: Path, dtype: str, guidance: float) -> Tiny:
    """A model whose adapter changes what it computes."""
    prompts = folder / "prompts.jsonl"
    prompts.write_text(json.dumps({"prompt": PROMPT, "metadata": {}}))
    path = folder / "recipe.json"
    path.write_text(json.dumps({
        "run": {"name": "shared", "steps": 1},
        "model": {
            "folder": str(folder), "height": 32, "width": 32, "guidance": guidance,
            "frames": 5 if family in tiny_models.VIDEO else 1, "dtype": dtype,
            "lora": {"rank": 2, "alpha": 4.0},
        },
        "data": {"prompts": str(prompts)},
        "sampling": {
            "steps": STEPS, "window": WINDOW, "first_window_starts": [0, START],
            "shared_noise": True,
        },
        "batch": {"groups": 1, "group_size": SAMPLES},
        "algorithm": {"kl_beta": 0.1, "clip_range": 1e-3},
        "trainer": {"learning_rate": 1e-3},
        "reward": {"scorers": [{"name": "size", "type": "jpeg-incompressibility"}]},
    }))  # fmt: skip
    recipe = load_recipe(path)
    policy = load_policy(recipe, {"transformer", "text", "decoder"})
    policy.model.transformer.to(getattr(torch, dtype))  # Wan's keeps some layers in float32
    move(policy, 0.03)
    return Tiny(recipe, policy)


def move(policy: LoadedPolicy, far: float) -> None:
    """Gives it an adapter that changes what is computed."""
    generator = torch.Generator().manual_seed(3)
    tensors = trained_tensors(policy.model.transformer)
    moved = {
        n: far * torch.randn(t.shape, generator=generator, dtype=t.dtype)
        for n, t in tensors.items()
    }
    load_weights(policy.model.transformer, moved)


def error(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> float:
    """Relative, over the whole gradient."""
    assert found.keys() == wanted.keys() and wanted
    difference = sum(float((found[n] - wanted[n]).double().square().sum()) for n in wanted)
    return float(
        (difference / sum(float(w.double().square().sum()) for w in wanted.values())) ** 0.5
    )


def unmerged(group: PathGroup) -> PathGroup:
    """The same group as if every sample had a state of its own."""
    assert group.starts is not None and group.start_of is not None
    own = group.starts[group.start_of][:, None]
    return replace(group, latents=torch.cat([own, group.latents], 1), starts=None, start_of=None)


CASES = [
    pytest.param(
        family,
        dtype,
        marks=[]
        if (family, dtype) in (("sd3", "float32"), ("flux", "float64"))
        else pytest.mark.slow,
    )
    for family in tiny_models.FAMILIES
    for dtype in TOLERANCE
]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    torch.set_num_threads(1)
    return {}


@pytest.mark.parametrize(("family", "dtype"), CASES)
def test_what_a_group_shares_is_computed_once_and_gives_the_same(
    family: str, dtype: str, folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> None:
    if family not in folders:
        folders[family] = tiny_models.save(family, tmp_path_factory.mktemp(family))
    for guidance in (1.0, 4.0) if family in tiny_models.CFG else (3.5,):
        tiny = load(family, folders[family], dtype, guidance)
        with passes(tiny.policy) as rows:
            stored = tiny.fragment()
        assert rows == [1] * (START + 1) + [SAMPLES] * (STEPS - START - 1)
        path = unpack_trajectory(stored)
        assert path.start is not None and path.latents.shape[:2] == (SAMPLES, WINDOW)
        plain = of_rows(tiny)
        assert float((path.states - plain).abs().max()) <= 1e-6
        check_gradient(tiny, tiny.group(stored), TOLERANCE[dtype])


def of_rows(tiny: Tiny) -> Tensor:
    """States (B, K+1, ...) of the same fragment, with a row of the network for every sample."""
    run, model = tiny.recipe.run, tiny.policy.model
    table = tiny.recipe.model
    shape = model.latent_shape(height=table.height, width=table.width, frames=table.frames)
    seeds = [sample_seed(run.seed, 2, 3, sample) for sample in range(SAMPLES)]
    denoising = Denoising(
        sampling_plan(tiny.recipe, window_start=START), seeds=seeds, shape=shape,
        device=tiny.policy.device,
    )  # fmt: skip
    noise = torch.Generator().manual_seed(group_seed(run.seed, 2, 3))
    denoising.latents = torch.randn(shape, generator=noise).expand(SAMPLES, *shape)
    conditions = repeat_rows(model.encode(PROMPT, guidance=table.guidance), SAMPLES)
    denoise(
        lambda latents, sigma: model.velocity(latents, sigma, conditions, guidance=table.guidance),
        denoising,
    )
    return denoising.trajectory().states


def check_gradient(tiny: Tiny, group: PathGroup, tolerance: float) -> None:
    """Fresh, and stale with log-probs that the clip acts on; all in one pass, and cut. Where a tiny
    network's float32 is not as good as the tolerance, rows that are cut otherwise say how good."""
    moved = 3e-3 * torch.randn(group.log_probs.shape, generator=torch.Generator().manual_seed(1))
    stale = replace(group, log_probs=group.log_probs + moved, staleness=1)
    for each, chunk in ((group, Chunk(3, 1)), (stale, Chunk(SAMPLES, WINDOW))):
        wanted, counted, rows = tiny.gradient(unmerged(each), Chunk(SAMPLES, WINDOW))
        assert rows == [SAMPLES * WINDOW] * 2, "with the reference's"
        found, metrics, rows = tiny.gradient(each, chunk)
        off = error(found, wanted)
        if off > tolerance:
            other, _, _ = tiny.gradient(unmerged(each), Chunk(1, 1))
            assert off <= 2 * error(other, wanted)
        assert sum(rows) == 2 * (1 + SAMPLES * (WINDOW - 1)) and rows[-2:] == [1, 1]
        assert metrics == pytest.approx({**counted, "states_per_group": 1}, rel=1e-4, abs=1e-6)
        if not each.staleness:
            assert metrics["onpolicy_ratio_error"] <= 1e-6
        else:
            assert metrics["clip_fraction_low"] + metrics["clip_fraction_high"] > 0


@pytest.fixture(scope="module")
def digits() -> Tiny:
    """The demo's model, at the step and the window of the others."""
    torch.set_num_threads(1)
    changes = {
        "sampling.steps": STEPS, "sampling.window": WINDOW, "sampling.sigmas": "linear",
        "sampling.first_window_starts": (0, START), "sampling.shared_noise": True,
        "batch.groups": 1, "batch.group_size": SAMPLES, "schedule.fragment_size": "auto",
        "trainer.micro_batch": "auto", "algorithm.kl_beta": 0.1,
    }  # fmt: skip
    recipe = override(load_recipe(DIGITS), changes)
    policy = load_policy(recipe, {"transformer", "text", "decoder"})
    move(policy, 0.1)
    return Tiny(recipe, policy)


def test_any_cut_of_a_group_begins_at_the_same_noise(digits: Tiny) -> None:
    """To the last bit at fragments of one size, whichever worker makes them."""
    paths = {size: [unpack_trajectory(digits.fragment(n, size)) for n in range(0, SAMPLES, size)]
             for size in (4, 2, 1)}  # fmt: skip
    whole = paths[4][0].states
    for size, parts in paths.items():
        assert float((torch.cat([each.states for each in parts]) - whole).abs().max()) <= 1e-6
        assert all(torch.equal(each.start, parts[0].start) for each in parts), size  # type: ignore[arg-type]
    assert digits.fragment(2, 2) == digits.fragment(2, 2)


def test_noise_is_the_group_s_own_and_later_noise_the_sample_s() -> None:
    """The same with and without sharing."""
    plan = SamplingPlan(sigmas=linear_sigmas(4), window=range(1), noise_level=0.7)
    made = []
    for shared in (None, 5, 6):
        denoising = Denoising(plan, seeds=[1, 2], shape=(2, 3), device=CPU, shared_seed=shared)
        begun = denoising.latents
        assert len(begun) == (2 if shared is None else 1)
        denoising.advance(lambda latents, sigma: torch.zeros_like(latents))
        path = denoising.trajectory()
        step = transition(torch.zeros_like(begun), begun, plan.step(torch.tensor([0])), noise=begun)
        made.append((path.latents[:, -1] - step.mean) / step.std)  # of one step, x_T is not scaled
        assert shared is None or torch.equal(begun[0], torch.randn(
            (2, 3), generator=torch.Generator().manual_seed(shared)
        ))  # fmt: skip
    torch.testing.assert_close(made[0], made[1])
    torch.testing.assert_close(made[1], made[2])


def test_a_fragment_with_one_bit_changed_is_trained_apart(digits: Tiny) -> None:
    same, other = digits.fragment(0, 2), digits.fragment(2, 2)
    tensors = unpack(other)
    tensors["start"].view(torch.int32).view(-1)[0] ^= 1
    planted = digits.group(same, pack(tensors))
    assert (digits.group(same, other).num_states, planted.num_states) == (1, 2)
    for group, states in ((digits.group(same, other), 1), (planted, 2)):
        wanted, _, _ = digits.gradient(unmerged(group), Chunk(1, 1))
        for chunk, at_states in ((Chunk(SAMPLES, 1), [states]), (Chunk(1, 1), [1] * states)):
            found, metrics, rows = digits.gradient(group, chunk)
            assert error(found, wanted) <= TOLERANCE["float32"]
            assert metrics["states_per_group"] == states
            assert [n for n in at_states for _ in range(2)] == rows[-2 * len(at_states) :]


def test_slices_of_a_group_add_up_and_its_merged_step_is_one_pass(digits: Tiny) -> None:
    group = digits.group(digits.fragment())
    wanted, counted, _ = digits.gradient(group, Chunk(SAMPLES, WINDOW))
    for is_last in (False, True):
        slices = slice_group(SAMPLES, 2, WINDOW, is_last=is_last, merged_steps=1)
        transaction = GradientTransaction.of(digits.recipe, digits.policy.model)
        transaction.begin()
        with passes(digits.policy) as rows:
            for each in slices:
                transaction.accumulate(group.sliced(each), Chunk(SAMPLES, WINDOW))
        parameters = trained_parameters(digits.policy.model.transformer)
        found = {name: p.grad for name, p in parameters.items() if p.grad is not None}
        assert error(found, wanted) <= TOLERANCE["float32"]
        assert transaction.metrics() == pytest.approx(counted, rel=1e-4, abs=1e-6)
        assert sum(rows) == 2 * (1 + SAMPLES * (WINDOW - 1))


def test_a_part_of_a_group_takes_the_passes_of_all_its_states(digits: Tiny) -> None:
    """Ranks that share weights wait for one another in every pass."""
    tensors = unpack(digits.fragment(2, 2))
    tensors["start"] += 1e-3
    group = digits.group(digits.fragment(0, 2), pack(tensors))
    halves = [group.sliced(GroupSlice(range(first, first + 2))) for first in (0, 2)]
    found = [digits.gradient(half, Chunk(2, WINDOW)) for half in halves]
    assert found[0][2] == found[1][2] == [2, 2, 2, 2]
    wanted, _, _ = digits.gradient(unmerged(group), Chunk(SAMPLES, WINDOW))
    both = {name: found[0][0][name] + found[1][0][name] for name in wanted}
    assert error(both, wanted) <= TOLERANCE["float32"]
    assert [metrics["states_per_group"] for _, metrics, _ in found] == [2, 2]


def test_samples_may_be_trained_at_steps_of_their_own(digits: Tiny) -> None:
    """As DanceGRPO does: all steps are stochastic, and each sample is trained at some of them."""
    changes = {
        "sampling.stochastic": "all", "sampling.trained": "random", "sampling.window": 2,
        "sampling.first_window_starts": (0, 0), "run.seed": SEED_OF_UNLIKE,
    }  # fmt: skip
    for shared in (False, True):
        recipe = override(digits.recipe, {**changes, "sampling.shared_noise": shared})
        drawn = replace(digits, recipe=recipe)
        with passes(drawn.policy) as rows:
            stored = [drawn.fragment(0, 3), drawn.fragment(3, 1)]
        assert rows == [1 if shared else 3, *[3] * (STEPS - 1), *[1] * STEPS]
        paths = [unpack_trajectory(each) for each in stored]
        chosen = torch.cat([path.trained for path in paths if path.trained is not None])
        assert len({tuple(each) for each in chosen.tolist()}) > 1, "each has its own"
        assert paths[0].step_indices.tolist() == list(range(STEPS - 1))
        group = drawn.group(*stored)
        wanted = by_hand(drawn, paths, chosen)
        first = int((chosen[:, 0] == 0).sum())
        for chunk in (Chunk(SAMPLES, 2), Chunk(3, 1)):
            found, metrics, rows = drawn.gradient(group, chunk)
            assert error(found, wanted) <= TOLERANCE["float32"]
            assert sum(rows) == 2 * (2 * SAMPLES - (first - 1 if shared else 0))
            assert metrics["onpolicy_ratio_error"] <= 1e-6
        assert 1 < first < SAMPLES, "or the test says little"


def by_hand(tiny: Tiny, paths: list[Trajectory], chosen: Tensor) -> dict[str, Tensor]:
    """The gradient, one row after the other."""
    plan = sampling_plan(tiny.recipe, window_start=0)
    transaction = GradientTransaction.of(tiny.recipe, tiny.policy.model)
    states = torch.cat([path.states for path in paths])
    log_probs = torch.cat([path.log_probs for path in paths])
    conditions = tiny.policy.model.encode(PROMPT, guidance=tiny.recipe.model.guidance)
    transaction.begin()
    for sample, places in enumerate(chosen.tolist()):
        for place in places:
            rows = TransitionRows(
                before=states[sample, place][None], arrived=states[sample, place + 1][None],
                step=plan.step(torch.tensor([place])), sigma=torch.tensor([plan.sigmas[place]]),
                behaviour_log_prob=log_probs[sample, place][None],
                behaviour_mean=None, advantage=torch.tensor([ADVANTAGES[sample]]),
                conditions=conditions,
            )  # fmt: skip
            transaction._accumulate_rows(rows, 0, "final")
    parameters = trained_parameters(tiny.policy.model.transformer)
    return {name: p.grad.clone() for name, p in parameters.items() if p.grad is not None}


def test_paths_of_another_way_to_sample_are_refused(digits: Tiny) -> None:
    drawn: dict[str, Any] = {"sampling.stochastic": "all", "sampling.trained": "random",
             "sampling.first_window_starts": (0, 0)}  # fmt: skip
    for changes, said in (
        ({"sampling.shared_noise": False}, "shared start"),
        (drawn, "window that the recipe trains"),
    ):
        with pytest.raises(ContractError, match=said):
            digits.group(digits.fragment(**changes))
    every: dict[str, Any] = {**drawn, "sampling.window": STEPS - 1}
    kept = override(digits.recipe, {**every, "sampling.trained": "window"})
    with pytest.raises(ContractError, match="drawn steps"):
        replace(digits, recipe=kept).group(digits.fragment(**every))
    tensors = unpack(digits.fragment(**every))
    for name, broken in (
        ("start", tensors["start"].expand(2, *tensors["start"].shape[1:])),
        ("start", tensors["start"] / 0),
        ("trained", tensors["trained"].flip(1)),
        ("trained", tensors["trained"] + 1),
        ("trained", tensors["trained"][:2]),
    ):
        with pytest.raises(ContractError, match="not a trajectory"):
            unpack_trajectory(pack({**tensors, name: broken}))


def test_evaluation_shares_nothing_and_has_no_noise(digits: Tiny) -> None:
    for changes in ({}, {"sampling.stochastic": "all"}):
        plan = sampling_plan(override(digits.recipe, changes), window_start=None)
        assert not plan.window and not plan.stochastic


def test_what_does_not_fit_after_the_shared_row_is_halved(
    digits: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One row fits, four do not."""
    whole = unpack_trajectory(digits.fragment())
    model: Any = digits.policy.model
    velocity = model.velocity

    def limited(latents: Tensor, *given: Any, **named: Any) -> Tensor:
        if len(latents) > 2:
            raise torch.OutOfMemoryError("out of memory")
        found: Tensor = velocity(latents, *given, **named)
        return found

    monkeypatch.setattr(model, "velocity", limited)
    made = unpack_trajectory(digits.fragment())
    assert made.start is not None and torch.equal(made.start, whole.start)  # type: ignore[arg-type]
    assert float((made.states - whole.states).abs().max()) <= 1e-6


def test_states_that_no_trained_sample_begins_at_take_no_pass(digits: Tiny) -> None:
    tensors = unpack(digits.fragment(0, 2))
    tensors["start"] += 1e-3
    group = digits.group(pack(tensors), digits.fragment(2, 2))
    picked = group.picked([3, 2])
    assert (group.num_states, picked.num_states) == (2, 1)
    found, _, rows = digits.gradient(picked, Chunk(2, WINDOW))
    assert rows == [2, 2, 1, 1]
    wanted, _, _ = digits.gradient(unmerged(group).picked([2, 3]), Chunk(2, WINDOW))
    assert error(found, wanted) <= TOLERANCE["float32"]
