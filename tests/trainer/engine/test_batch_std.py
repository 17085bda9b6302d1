"""Advantages over the standard deviation of the batch: groups are trained before it is known, and
the gradient is that of all rewards known first, clip, KL and all."""

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from diffusers.models.normalization import RMSNorm
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor

from services.trainer.engine.trainer_engine import TrainerEngine
from shared.devices.chunks import Chunk
from shared.devices.protocols import AdvantageKind, GroupData
from shared.diffusion.policy import LoadedPolicy, copy_policy, load_policy
from shared.diffusion.tensors import pack, unpack
from shared.diffusion.training.sums import REST, Rest
from shared.diffusion.weights import load_weights, trained_tensors
from shared.learning.advantages import batch_scale, centred, excess
from shared.recipe.recipe import Recipe, override
from tests.stored import packed
from tests.trainer.batches import Group, make_batch
from tests.trainer.engine.test_gradient import one_shot_reference, relative_error

TOLERANCE = {"float32": 1e-5, "float64": 1e-10}
CLIP = 0.6
REWARDS = ((0.03, 0.27, 0.12, 0.12), (0.9, 0.3, 0.6, 0.75), (0.0, 0.0, 0.0, 0.0))
"""Rewards of each group; the third has only its KL."""
SCALE = batch_scale([reward for rewards in REWARDS for reward in rewards])
CENTRED = [centred(rewards) for rewards in REWARDS]
FINAL = [[max(-CLIP, min(CLIP, SCALE * each)) for each in group] for group in CENTRED]
MOMENT = 0.1
"""What Adam's first moment takes of a gradient."""


@dataclass(frozen=True)
class Case:
    recipe: Recipe
    here: LoadedPolicy
    there: LoadedPolicy
    """The same policy on another device."""
    groups: list[Group]
    adapter: bytes
    references: list[dict[str, Tensor]]
    """Gradients of each group if all rewards are known first; of the second if it is stale."""

    def reference(self, is_stale: bool) -> dict[str, Tensor]:
        """Return the gradient of the batch, whose second group may be stale."""
        fresh = list(self.references)
        stale = fresh.pop()
        trained = [fresh[0], stale if is_stale else fresh[1], fresh[2]]
        if self.drops_zeros:  # the third group: neither its KL nor its rows count
            return {name: 3 / 2 * each for name, each in total(trained[:2]).items()}
        return total(trained)

    @property
    def drops_zeros(self) -> bool:
        return self.recipe.algorithm.zero_advantages == "dropped"

    @property
    def tolerance(self) -> float:
        return TOLERANCE[self.recipe.model.dtype]

    def data(
        self,
        group: int,
        cut: Sequence[int] = (4,),
        stale: bool = False,
        advantages: Sequence[float] | None = None,
        kind: AdvantageKind | None = None,
    ) -> GroupData:
        """Return a group as the trainer has it, by default with centred advantages."""
        return GroupData(
            trajectories=tuple(self.groups[group].cut(cut)),
            conditions=self.groups[group].conditions,
            advantages=tuple(CENTRED[group] if advantages is None else advantages),
            staleness=int(stale),
            kind=kind,
        )

    def engine(self, **changes: object) -> TrainerEngine:
        """Return a trainer with the weights that the case begins with."""
        recipe = override(self.recipe, {k.replace("__", "."): v for k, v in changes.items()})
        load_weights(self.here.model.transformer, unpack(self.adapter))
        engine = TrainerEngine(recipe, self.here)
        engine.begin()
        return engine


@pytest.fixture(scope="module", autouse=True)
def norms_of_the_networks_type() -> Iterator[None]:
    """diffusers' own round to float32 inside a float64 network: a gradient would be linear in what
    it is the gradient of to 2e-8 only."""

    def forward(norm: RMSNorm, hidden: Tensor) -> Tensor:
        variance = hidden.pow(2).mean(-1, keepdim=True)
        normed: Tensor = hidden * torch.rsqrt(variance + norm.eps) * norm.weight
        return normed

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RMSNorm, "forward", forward)
        yield


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(("float32", "kept"), marks=pytest.mark.slow),
        ("float64", "kept"),
        ("float64", "dropped"),
    ],
    ids="-".join,
)
def case(request: pytest.FixtureRequest, recipe: Recipe) -> Case:
    dtype, zero_advantages = request.param
    changes = {
        "model.dtype": dtype,
        "algorithm.zero_advantages": zero_advantages,
        "algorithm.advantage_std": "batch",
        "algorithm.advantage_clip": CLIP,
        "algorithm.kl_beta": 3.0,
        "trainer.max_grad_norm": 1e6,
        "trainer.learning_rate": 1e-3,
        "sampling.window": 2,
        "schedule.tsp_steps": 2,
    }
    recipe = override(recipe, changes)
    here = load_policy(recipe, {"transformer", "text", "decoder"})
    tensors, generator = trained_tensors(here.model.transformer), torch.Generator().manual_seed(3)
    load_weights(here.model.transformer, {
        name: (0.1 * torch.randn(each.shape, generator=generator)).to(each.dtype)
        for name, each in tensors.items()
    })  # fmt: skip
    groups = make_batch(recipe, off_policy=3e-3, loaded=here)
    scored = [replace(g, advantages=final) for g, final in zip(groups, FINAL, strict=True)]
    references = [
        one_shot_reference(here.model, recipe, group, staleness)
        for group, staleness in [*((group, 0) for group in scored), (scored[1], 1)]
    ]
    adapter = pack(trained_tensors(here.model.transformer))
    return Case(recipe, here, copy_policy(here, 0), groups, adapter, references)


def moments(engine: TrainerEngine) -> dict[str, Tensor]:
    stored = unpack(packed(engine.weights().checkpoint))
    return {n.removeprefix("exp_avg/"): t for n, t in stored.items() if n.startswith("exp_avg/")}


def total(parts: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    return {name: torch.stack([part[name] for part in parts]).sum(0) for name in parts[0]}


def take_excess_away(case: Case, engine: TrainerEngine, group: int, **how: object) -> None:
    if any(excess(CENTRED[group], CLIP / SCALE)):
        data = case.data(group, kind="excess", **how)  # type: ignore[arg-type]
        data = replace(data, limit=CLIP / SCALE)
        engine.train(engine.read(data), kind=data.kind)


NO_SHRINKING = [phase for phase in Phase if phase != Phase.shrink]
"""Examples take a second each."""
CUTS = st.sampled_from([(4,), (2, 2), (1, 3), (1, 1, 2)])
CHUNKS = st.none() | st.builds(Chunk, samples=st.integers(1, 4), steps=st.integers(1, 2))


@pytest.mark.filterwarnings("ignore:Generating overly large repr")  # of a failing case
@given(
    order=st.permutations([0, 1, 2]),
    cuts=st.lists(CUTS, min_size=3, max_size=3),
    chunks=st.lists(CHUNKS, min_size=3, max_size=3),
    is_stale=st.booleans(),
    elsewhere=st.sets(st.integers(0, 2)),
    recomputes=st.booleans(),
)
@settings(max_examples=4, phases=NO_SHRINKING, deadline=None)
def test_groups_in_any_order_and_cut_from_any_device_give_the_one_shot_gradient(
    case: Case,
    order: list[int],
    cuts: list[tuple[int, ...]],
    chunks: list[Chunk | None],
    is_stale: bool,
    elsewhere: set[int],
    recomputes: bool,
) -> None:
    engine = case.engine()
    engine._transaction.one_forward = not recomputes
    for group, cut, chunk in zip(order, cuts, chunks, strict=True):
        data = case.data(group, cut, is_stale and group == 1)
        if group in elsewhere:
            other = TrainerEngine(case.recipe, case.there)
            other.begin()
            other.train(other.read(data))
            engine.add(other.gradient(), other.tally)
        else:
            engine.train(engine.read(data), chunk)
    for group in order:
        take_excess_away(case, engine, group, stale=is_stale)
    metrics = engine.step(0, SCALE)
    wanted = case.reference(is_stale)
    found = {name: each / MOMENT for name, each in moments(engine).items()}
    assert relative_error(found, wanted) <= case.tolerance
    norm = sum(float((each**2).sum()) for each in wanted.values()) ** 0.5
    assert metrics["grad_norm"] == pytest.approx(norm, rel=1e-5)


def test_without_what_is_beyond_the_clip_or_with_one_sum_the_gradient_is_another(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the property above would say little."""
    wanted = case.reference(is_stale=False)
    for planted in ("no correction", "one sum"):
        engine = case.engine()
        if planted == "one sum":
            monkeypatch.setattr(Rest, "taking", lambda *_: nullcontext())
        for group in range(3):
            engine.train(engine.read(case.data(group)))
            if planted == "one sum":
                take_excess_away(case, engine, group)
        engine.step(0, SCALE)
        found = {name: each / MOMENT for name, each in moments(engine).items()}
        assert relative_error(found, wanted) > 1e-2, planted


def test_after_the_first_of_two_updates_groups_are_trained_by_their_advantages(case: Case) -> None:
    engine = case.engine(trainer__updates=2, batch__groups=2)
    engine.train(engine.read(case.data(1)))
    take_excess_away(case, engine, 1)
    engine.step(0, SCALE)
    first = moments(engine)
    assert relative_error(
        {name: each / MOMENT for name, each in first.items()},
        {name: 3 * each for name, each in case.references[1].items()},
    ) <= case.tolerance  # fmt: skip
    moved = one_shot_reference(
        case.here.model, case.recipe, replace(case.groups[0], advantages=FINAL[0]), 1
    )
    final = case.data(0, advantages=[SCALE * each for each in CENTRED[0]])
    engine.train(engine.read(final), kind="final")
    engine.step(0)
    second = {n: (each - 0.9 * first[n]) / MOMENT for n, each in moments(engine).items()}
    assert relative_error(second, {n: 3 * each for n, each in moved.items()}) <= case.tolerance


def test_metrics_are_those_of_the_scaled_loss(case: Case) -> None:
    engine = case.engine()
    for group in range(3):
        engine.train(engine.read(case.data(group)))
        take_excess_away(case, engine, group)
    metrics = engine.step(0, SCALE)
    once = case.engine()
    for group in range(3):
        data = case.data(group, advantages=[SCALE * each for each in CENTRED[group]])
        once.train(once.read(data), kind="final")
    wanted = once.step(0)
    assert metrics == pytest.approx(wanted, rel=1e-3, abs=1e-6)
    assert metrics["kl"] > 0


def test_a_trial_that_does_not_fit_leaves_both_sums_as_they_were(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    if case.recipe.model.dtype != "float64":
        return
    engine = case.engine(trainer__micro_batch="auto", schedule__tsp_steps="auto")
    engine.train(engine.read(case.data(0)))
    before = engine.gradient()
    whole = engine._transaction._backward
    calls = []

    def fails(per_row: Tensor, **named: Any) -> None:
        calls.append(len(per_row))
        if len(calls) == 4:  # in the middle of a group, with one of its sums further than the other
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.")
        whole(per_row, **named)

    monkeypatch.setattr(type(engine._transaction), "_backward", staticmethod(fails))
    assert engine.train(engine.read(case.data(1))) is not None
    after = engine.gradient()
    monkeypatch.undo()
    wanted = case.engine(trainer__micro_batch=4)
    wanted.train(wanted.read(case.data(1)))
    assert any(name.startswith(REST) for name in before)
    difference = {name: after[name] - before[name] for name in after}
    assert relative_error(difference, wanted.gradient()) < 1e-10


def test_rows_without_advantage_are_left_out_where_they_have_no_gradient(case: Case) -> None:
    """They are skipped in the passes, and still count in the denominator of the sum."""
    advantages = (1.5, 0.0, -0.5, 0.0)
    for beta, wanted in ((0.0, 2), (0.3, 2 if case.drops_zeros else 4)):
        gradients, metrics, rows = [], [], list[int]()
        for left_out in (False, True):
            changes = {"algorithm__kl_beta": beta, "algorithm__advantage_std": "group"}
            engine = case.engine(trainer__micro_batch=4, **changes)
            count, whole = engine._loaded.model.velocity, rows if left_out else list[int]()

            def counted(latents, *rest, whole=whole, count=count, **more):  # type: ignore
                whole.append(len(latents) * torch.is_grad_enabled())
                return count(latents, *rest, **more)

            engine._loaded.model.velocity = counted  # type: ignore[method-assign]
            data = case.data(0, advantages=advantages)
            engine.train(engine.read(data), None if left_out else Chunk(4, 2))
            del engine._loaded.model.velocity
            gradients.append(engine.gradient())
            metrics.append(engine.step(0))
        assert relative_error(*gradients) <= 1e-6
        assert sum(rows) == 2 * wanted
        assert [each["zero_advantage_fraction"] for each in metrics] == [0.5, 0.5]


def test_a_mean_over_the_rows_that_are_kept_is_that_of_each_update_and_never_by_zero(
    case: Case,
) -> None:
    zeros, mixed = (0.0,) * 4, (1.5, 0.0, -0.5, 0.0)
    alone = case.engine(algorithm__advantage_std="group", batch__groups=1)
    alone.train(alone.read(case.data(0, advantages=mixed)))
    norm = alone.step(0)["grad_norm"]
    engine = case.engine(algorithm__advantage_std="group", batch__groups=4, trainer__updates=2)
    norms = []
    for advantages in ((mixed, zeros), (zeros, zeros)):
        for each in advantages:
            engine.train(engine.read(case.data(0, advantages=each)))
        norms.append(engine.step(0)["grad_norm"])
    if case.drops_zeros:  # of both, the mean over the two rows of each step that have an advantage
        assert norms == pytest.approx([norm, 0.0], rel=1e-6)
    else:
        assert norms[0] < 0.9 * norm and norms[1] > 0, "the KL pulls"
