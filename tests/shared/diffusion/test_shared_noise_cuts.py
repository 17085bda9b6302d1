"""A group that begins at one noise may be cut in any way, and what does not belong to it is
refused; with the digits model."""

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from shared.devices.chunks import Chunk
from shared.devices.slices import GroupSlice
from shared.diffusion.policy import load_policy, sampling_plan
from shared.diffusion.sampling.sampler import Denoising, SamplingPlan, Trajectory
from shared.diffusion.sampling.tensors import pack, unpack, unpack_trajectory
from shared.diffusion.sampling.transition import transition
from shared.diffusion.training.gradient import GradientTransaction
from shared.diffusion.training.group import TransitionRows
from shared.diffusion.weights.trained_weights import trained_parameters
from shared.errors import ContractError
from shared.models.sigmas import linear_sigmas
from shared.recipe.recipe import load_recipe, override
from tests.paths import DIGITS
from tests.shared.diffusion.shared_noise import (
    ADVANTAGES,
    SAMPLES,
    SEED_OF_UNLIKE,
    START,
    STEPS,
    TOLERANCE,
    WINDOW,
    Tiny,
    error,
    move,
    passes,
    unmerged,
)
from tests.tiny_models import PROMPT


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
    """It is equal to the last bit at fragments of one size, whichever worker makes them."""
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
        denoising = Denoising(
            plan, seeds=[1, 2], shape=(2, 3), device=torch.device("cpu"), shared_seed=shared
        )
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


@pytest.mark.parametrize(("size", "rows"), [(8, [9, 9]), (7, [7, 7, 1, 1])])
def test_a_shared_state_goes_with_a_full_chunk_of_eight_rows(
    digits: Tiny, size: int, rows: list[int]
) -> None:
    """A call of the network costs more than one row of eight, and less than one of few."""
    large = replace(digits, recipe=override(digits.recipe, {"batch.group_size": size}))
    advantages = torch.linspace(-1, 1, size, dtype=torch.float64)
    made = unpack_trajectory(large.fragment(0, size))
    group = replace(
        digits.group(digits.fragment()), latents=made.latents, log_probs=made.log_probs,
        start_of=torch.zeros(size).long(), trained=torch.arange(WINDOW).expand(size, -1),
        advantages=advantages, samples=torch.arange(size), starts=made.start,
    )  # fmt: skip
    wanted, _, _ = large.gradient(unmerged(group), Chunk(size, WINDOW))
    found, _, taken = large.gradient(group, Chunk(size, 1))
    assert taken == rows
    assert error(found, wanted) <= TOLERANCE["float32"]


def test_slices_of_a_group_add_up_and_its_merged_step_is_one_pass(digits: Tiny) -> None:
    group = digits.group(digits.fragment())
    wanted, counted, _ = digits.gradient(group, Chunk(SAMPLES, WINDOW))
    halves = range(SAMPLES // 2), range(SAMPLES // 2, SAMPLES)
    for is_fine in (False, True):
        steps = range(1, WINDOW + 1) if is_fine else (1, WINDOW)
        later = [GroupSlice(half, first, end) for half in halves for first, end in pairwise(steps)]
        slices = [GroupSlice(range(SAMPLES), 0, 1), *later]
        transaction = GradientTransaction.from_recipe(digits.recipe, digits.policy.model)
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
    assert found[0][2] == found[1][2] == [4, 4]
    wanted, _, _ = digits.gradient(unmerged(group), Chunk(SAMPLES, WINDOW))
    both = {name: found[0][0][name] + found[1][0][name] for name in wanted}
    assert error(both, wanted) <= TOLERANCE["float32"]
    assert [metrics["states_per_group"] for _, metrics, _ in found] == [2, 2]


def test_samples_may_be_trained_at_steps_of_their_own(digits: Tiny) -> None:
    """All steps are stochastic, and each sample is trained at some of them, as DanceGRPO does."""
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
    transaction = GradientTransaction.from_recipe(tiny.recipe, tiny.policy.model)
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
            transaction._accumulate_rows(rows, 0)
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
    assert rows == [3, 3]
    wanted, _, _ = digits.gradient(unmerged(group).picked([2, 3]), Chunk(2, WINDOW))
    assert error(found, wanted) <= TOLERANCE["float32"]
