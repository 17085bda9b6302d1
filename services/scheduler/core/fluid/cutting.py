"""Cuts whole groups into pieces: how many samples or trained steps the next piece has."""

import itertools
import math
from dataclasses import replace
from typing import NamedTuple

from services.scheduler.core.fluid.fluid_state import FluidState, GroupPieces, PieceState, num_rows
from services.scheduler.core.state import Plan
from shared.devices.slices import FINE_PARTS
from shared.messages.fluid import Piece

MIN_ROWS = 3
"""Rows (sample, step) of the smallest piece while it is not known what passes cost."""


class PieceLimits(NamedTuple):
    """Limits on the size of a piece."""

    num_members: int
    min_rows: float = MIN_ROWS
    """Rows of the smallest piece that pays."""
    pass_rows: int = 0
    """Rows of a pass at most, of which larger pieces have as many; 0: any."""
    ranks: int = 1
    """Ranks of a shard group, which divide the samples of a piece."""


def most_pieces(plan: Plan) -> int:
    """Return into how many pieces a batch is cut at most."""
    finest = plan.num_groups * (trained_samples(plan) * FINE_PARTS + 1)
    return min(plan.most_pieces, finest)


def whole_group(plan: Plan, attempt: int) -> GroupPieces:
    """A group that was just sent to be trained, of which nothing is cut yet."""
    return GroupPieces(
        attempt=attempt, num_samples=trained_samples(plan), merged_steps=plan.merged_steps
    )


def in_one_piece(plan: Plan, attempt: int) -> GroupPieces:
    """A group that one member takes whole."""
    group = whole_group(plan, attempt)
    piece = Piece(
        group=0, attempt=attempt, number=0, first_sample=0, num_samples=group.num_samples,
        first_step=0, num_steps=plan.trained_steps,
    )  # fmt: skip
    return replace(group, num_cut=group.num_samples, pieces=(PieceState(piece=piece),))


def group_share(plan: Plan, piece: Piece) -> float:
    """Return the share of a whole group's rows that a piece has."""
    return num_rows(piece, plan.merged_steps) / rows_per_group(plan)


def rows_per_group(plan: Plan, ranks: int = 1) -> int:
    """Return the rows of a whole group, or of the one of several ranks that trains most of it."""
    samples, merged = -(-trained_samples(plan) // ranks), plan.merged_steps
    return samples * (plan.trained_steps - merged) + merged


def cut_to(plan: Plan, piece: Piece) -> int:
    """Return how many of a group's first samples are cut once this piece is."""
    apart = piece.steps.stop > plan.merged_steps or plan.trained_steps == plan.merged_steps
    return piece.samples.stop if apart else 0


def groups_left(plan: Plan, fluid: FluidState) -> float:
    """Groups of the update that no member has trained yet."""
    uncut = plan.part(fluid.update).stop - fluid.num_cut / trained_samples(plan)
    return uncut + fluid.waiting_rows / rows_per_group(plan)


def next_piece(
    plan: Plan, fluid: FluidState, index: int, share: float, limits: PieceLimits
) -> tuple[FluidState, tuple[int, int]]:
    """Return the place of the next piece of a group. If no piece waits, one is cut, and its samples
    are a multiple of the ranks where that is possible."""
    group = fluid.groups[index]
    for place, each in enumerate(group.pieces):
        if each.worker is None:
            return fluid, (index, place)
    cut_off = _cut(plan, fluid, index, share, limits)
    pieces = [PieceState(piece=piece) for piece in cut_off]
    first, end = len(group.pieces), max(cut_to(plan, each.piece) for each in pieces)
    cut = replace(group, pieces=(*group.pieces, *pieces), num_cut=max(group.num_cut, end))
    return fluid.with_group(index, cut), (index, first)


def _cut(
    plan: Plan, fluid: FluidState, index: int, share: float, limits: PieceLimits
) -> list[Piece]:
    """The next piece, or all parts of the next sample; at first what a group computes once."""
    group = fluid.groups[index]

    def piece(first: int, count: int, steps: range) -> Piece:
        return Piece(
            group=index, attempt=group.attempt, number=0, first_sample=first, num_samples=count,
            first_step=steps.start, num_steps=len(steps),
        )  # fmt: skip

    left, merged = group.num_samples - group.num_cut, plan.merged_steps
    own = range(merged, plan.trained_steps)
    if plan.schedule.deterministic or (limits.num_members == 1 and not group.pieces):
        return [piece(0, group.num_samples, range(plan.trained_steps))]
    if merged and not group.pieces:
        return [piece(0, group.num_samples, range(merged))]
    samples, ranks = share * group.num_samples, limits.ranks
    least = max(ranks, _min_samples(plan, fluid, limits))
    if samples >= 1 or least > 1:
        count = -(-max(least, math.floor(samples)) // ranks) * ranks
        of_pass = limits.pass_rows // len(own) // ranks * ranks
        if 0 < of_pass < count:
            count = max(count - count % of_pass, -(-least // of_pass) * of_pass)
        return [piece(group.num_cut, min(left, count), own)]
    parts = min(_max_parts(plan, fluid, limits), math.ceil(1 / max(samples, 1e-9)))
    ends = [merged + len(own) * n // parts for n in range(parts + 1)]
    return [piece(group.num_cut, 1, range(begin, end)) for begin, end in itertools.pairwise(ends)]


def _min_nameable(plan: Plan, fluid: FluidState, num_members: int) -> float:
    """Return the samples of the smallest pieces with which one message can name all of the batch.

    Each piece is half of a fair share x of the remaining work. n members thus take 2 n ln(x / s)
    pieces until pieces are as small as s, and 2 n pieces for the rest: solved for s.
    """
    samples = trained_samples(plan)
    uncut = max(1, plan.num_groups * samples - fluid.num_cut)
    # What a group computes once is a piece of its own, and the last of a group may be a small one.
    kept = uncut / samples if plan.merged_steps else 0.0
    room = max(1.0, plan.most_pieces - fluid.num_pieces - kept)
    share, rounds = uncut / (2 * num_members), room / (2 * num_members)
    return uncut / room if rounds <= 1 else share * math.exp(1 - rounds)


def _min_samples(plan: Plan, fluid: FluidState, limits: PieceLimits) -> int:
    """Samples of a piece at least."""
    own = max(1, plan.trained_steps - plan.merged_steps)
    nameable = math.ceil(_min_nameable(plan, fluid, limits.num_members))
    return min(trained_samples(plan), max(1, nameable, math.ceil(limits.min_rows / own)))


def trained_samples(plan: Plan) -> int:
    """Return the samples of a group that are trained."""
    return plan.trained_samples or plan.group_size


def _max_parts(plan: Plan, fluid: FluidState, limits: PieceLimits) -> int:
    """Parts of a sample at most."""
    own = plan.trained_steps - plan.merged_steps
    nameable = int(1 / max(_min_nameable(plan, fluid, limits.num_members), 1 / FINE_PARTS))
    return min(FINE_PARTS, max(1, int(own // limits.min_rows)), max(1, nameable))


def piece_sizes(
    plan: Plan, fluid: FluidState, num_members: int, ranks: int = 1, *, is_learned: bool = True
) -> list[float]:
    """Return the rows, of a rank, of the pieces that a group, or a sample, can be cut into evenly;
    only the usual ones while it is not known what passes cost."""
    own, samples = max(1, plan.trained_steps - plan.merged_steps), trained_samples(plan)
    if plan.schedule.deterministic:
        return [float(rows_per_group(plan, ranks))]
    if not is_learned:
        return [float(MIN_ROWS)]
    each = -(-samples // ranks)
    least = _min_nameable(plan, fluid, num_members) / ranks
    whole = {float(-(-each // k)) for k in range(1, each + 1)}
    parts = {1 / k for k in range(2, FINE_PARTS + 1) if k <= own and ranks == 1}
    return [own * n for n in whole | parts if n >= least] or [float(own * each)]
