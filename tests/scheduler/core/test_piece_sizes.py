"""Pieces of a batch: one message can name all of them, and the last ones are small."""

from dataclasses import replace

import pytest

from services.scheduler.core.fluid.cutting import PieceLimits, group_share, next_piece, whole_group
from services.scheduler.core.fluid.fluid_state import FluidState, PieceState
from services.scheduler.core.fluid.pieces import trainable
from services.scheduler.core.state import Plan
from services.scheduler.costs.profile import load_profile
from services.scheduler.sim.steady import steady_plan
from shared.devices.slices import FINE_PARTS
from shared.limits import MAX_PIECES
from shared.recipe.schedule import RunSchedule


def plan_of(profile: str, groups: int) -> Plan:
    shape = load_profile(profile).shape.model_copy(update={"groups": groups, "updates": 1})
    return steady_plan(shape, batches=1, schedule=RunSchedule(mode="fluid"))


def cut(plan: Plan, members: int, ranks: int = 1) -> tuple[FluidState, list[float]]:
    """Give all of a batch out, to one equal member after the other; return each piece's part of a
    group, in order."""
    fluid, parts = FluidState(batch=0), list[float]()
    for index in range(plan.num_groups):
        fluid = fluid.with_group(index, whole_group(plan, 0))
    left = float(plan.num_groups)
    while ready := trainable(plan, fluid):
        share = left / (2 * members)
        fluid, (index, place) = next_piece(
            plan, fluid, min(ready), share, PieceLimits(members, ranks=ranks)
        )
        group = fluid.groups[index]
        given = PieceState(piece=group.pieces[place].piece, worker="trainer-0")
        pieces = (*group.pieces[:place], given, *group.pieces[place + 1 :])
        fluid = fluid.with_group(index, replace(group, pieces=pieces))
        parts.append(group_share(plan, given.piece))
        left -= parts[-1]
    return fluid, parts


@pytest.mark.parametrize(
    ("profile", "groups"), [("flux1-dev", 32), ("flux1-dev", 512), ("wan2.1-14b", 256)]
)
def test_the_last_piece_of_every_member_is_part_of_a_sample(profile: str, groups: int) -> None:
    plan = plan_of(profile, groups)
    fluid, parts = cut(plan, groups)
    assert sum(parts) == pytest.approx(groups)
    assert fluid.num_pieces == len(parts) <= MAX_PIECES
    assert max(parts[-groups:]) <= 1 / plan.group_size
    assert parts[-1] == pytest.approx(1 / plan.group_size / FINE_PARTS, rel=0.4)


@pytest.mark.parametrize(("groups", "samples"), [(1024, 1), (2048, 4), (4096, 8)])
@pytest.mark.slow
def test_one_message_names_all_of_a_batch_however_large_it_is(groups: int, samples: int) -> None:
    plan = plan_of("flux1-dev", groups)
    fluid, parts = cut(plan, groups)
    assert sum(parts) == pytest.approx(groups)
    assert fluid.num_pieces == len(parts) <= MAX_PIECES
    assert parts[-1] <= samples / plan.group_size


@pytest.mark.parametrize("merged_steps", [0, 1])
@pytest.mark.parametrize(("groups", "size", "members"), [(1500, 23, 300), (1024, 16, 4096)])
def test_one_message_names_all_of_a_batch_of_any_shape(
    groups: int, size: int, members: int, merged_steps: int
) -> None:
    plan = plan_of("flux1-dev", groups)
    fluid, parts = cut(replace(plan, group_size=size, merged_steps=merged_steps), members)
    assert sum(parts) == pytest.approx(groups)
    assert fluid.num_pieces == len(parts) <= MAX_PIECES


def test_a_group_that_begins_again_gives_its_pieces_back() -> None:
    plan = plan_of("flux1-dev", 4)
    fluid, _ = cut(plan, 4)
    number = len(fluid.groups[2].pieces)
    without = fluid.without_group(2)
    assert without.num_pieces == fluid.num_pieces - number
    assert without.num_cut == fluid.num_cut - plan.group_size


@pytest.mark.parametrize("ranks", [2, 4])
def test_pieces_of_a_shard_group_have_as_many_samples_on_each_rank(ranks: int) -> None:
    plan = plan_of("flux1-dev", 32)
    assert plan.group_size % ranks == 0
    fluid, parts = cut(plan, 4, ranks)
    assert sum(parts) == pytest.approx(32)
    own = [
        each.piece.num_samples
        for group in fluid.groups.values()
        for each in group.pieces
        if each.piece.steps.stop > plan.merged_steps
    ]
    assert own and all(samples % ranks == 0 for samples in own)
