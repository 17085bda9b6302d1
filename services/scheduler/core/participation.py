"""Decides which devices train and which generate, by what their lines cost a batch.

A member that exchanges sums makes each version itself, but every round waits for the slowest line.
A member that does not fetches each version, and generates once it has that. So the members with the
fastest lines train, as many as make a batch shortest; and a device that would have a version only
after the others have generated everything gets no fragments. The decision is made when a batch
is in a step and when the next one opens, by the rates at which devices fetch versions.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from services.scheduler.core.device_queues import sample_seconds, version_bytes
from services.scheduler.core.fluid.cutting import trained_samples
from services.scheduler.core.fluid.fluid_state import FluidState
from services.scheduler.core.fluid.levels import min_share
from services.scheduler.core.fluid.links import Line, round_seconds
from services.scheduler.core.fluid.modes import has_loans
from services.scheduler.core.fluid.places import group_members, site_and_host
from services.scheduler.core.state import Plan, State, WorkerState

SLOW_LINE_FACTOR = 1.5
"""Lines whose seconds exceed the usual ones by less are as good: measurements have noise."""
SAME_LINE_FACTOR = 1.2
"""Slow lines whose seconds differ by less are one line: all of its members train, or do not."""
MIN_LOSS = 0.01
"""Share of a batch that a line has to cost before its device declines work."""
MIN_LATE_GAIN = 0.3
"""Least gain of late devices, over that without delay: more devices make fragments smaller."""
MAX_UNKNOWN_S = 10.0
"""Seconds of a sum and its total that no batch is too short for."""
MIN_GAIN = 0.03
"""Share of a batch that a device has to gain before it is given work again."""


@dataclass(frozen=True, slots=True)
class DeviceLine:
    """The seconds that a device and its line take."""

    worker: WorkerState
    sample: float
    """Per sample, generated or on the way up; infinite: it generates nothing."""
    latency: float
    """Until the first sample is there; pieces wait for it."""
    group: float
    """Per group, trained or on the way down; infinite for a device that is no member."""
    line: Line
    version: float
    """For a version."""


class BatchSeconds(NamedTuple):
    """Forecasts a batch with some of the members training."""

    end: float
    """When devices that come later no longer help."""
    total: float


def decide(plan: Plan, state: State) -> State:
    """Decide for the batch that opens."""
    fluid, costs = state.fluid, state.costs
    is_measured = costs.up or costs.down
    if state.recovering or fluid is None or not fluid.sum_bytes or not is_measured:
        return state
    lines = _lines(plan, state, fluid)
    members = [each for each in lines if math.isfinite(each.group)]
    if not members:
        return state
    training, seconds = _training(plan, fluid, lines, members)
    rates = _rates(lines, training)
    changed = [
        _decided(plan, each, each.worker.address in training, seconds, fluid.sum_bytes, rates)
        for each in lines
    ]
    return _with_changed(state, changed)


def admit(plan: Plan, state: State, address: str) -> State:
    """Decide for a device that has come to hold the open batch's version, and before the batch's
    first piece for all: after a restart of the scheduler the first ones report without others."""
    decided, fluid = decide(plan, state), state.fluid
    if fluid is None or not fluid.num_pieces:
        return decided
    worker = decided.workers.get(address)
    return state if worker is None else state.with_worker(worker)


def readmit_last(_plan: Plan, state: State, _event: object, _now: float) -> State:
    """Give work to all again if no device is left that trains, or that generates."""
    able = [each for each in state.workers.values() if each.takes_work]
    trains = any(each.service == "member" and not each.no_pieces for each in able)
    generates = bool(state.workers.roles.places)
    return _with_changed(state, [
        replace(each, no_pieces=trains * each.no_pieces, no_fragments=generates * each.no_fragments)
        for each in able
    ])  # fmt: skip


def _with_changed(state: State, workers: Sequence[WorkerState]) -> State:
    changed = [each for each in workers if each != state.workers[each.address]]
    return replace(state, workers=state.workers.changed(changed)) if changed else state


def _lines(plan: Plan, state: State, fluid: FluidState) -> list[DeviceLine]:
    costs, best = state.costs, dict[str, str]()
    for address in sorted({*costs.up, *costs.down}, key=costs.sum_seconds, reverse=True):
        best[site_and_host(fluid, address)[0]] = best[""] = address
    return [
        _line(plan, state, fluid, worker, best)
        for worker in state.workers.values()
        if worker.takes_work and worker.address not in fluid.gone
    ]


def _line(
    plan: Plan, state: State, fluid: FluidState, worker: WorkerState, best: Mapping[str, str]
) -> DeviceLine:
    """``best``: the device with the fastest line of each site, and of all, which counts for one
    that was not measured: others read versions for it, or it reads them too quickly to measure."""
    costs, address, is_member = state.costs, worker.address, worker.service == "member"
    lent = 0 if state.tag.controller.mode == "off" else worker.lent_concurrency
    queues = worker.concurrency or lent
    up = costs.sample_up_seconds(address)
    sample = sample_seconds(state, worker)
    version = costs.version_seconds(address, version_bytes(fluid, worker))
    read = trained_samples(plan) * costs.sample_bytes.seconds * costs.down_seconds(address)
    measured = address
    if not costs.is_measured(address):
        measured = best.get(site_and_host(fluid, address)[0], best[""])
    sent = fluid.sum_bytes * min_share(plan.schedule.up) * costs.up_seconds(measured)
    return DeviceLine(
        worker=worker,
        sample=max(sample, up) / queues if queues else math.inf,
        latency=sample + up,
        group=max(costs.gradient_seconds(address) or 0.0, read) if is_member else math.inf,
        line=Line(sent, fluid.sum_bytes * costs.down_seconds(measured)),
        version=version or 0.0,
    )


def _training(
    plan: Plan, fluid: FluidState, lines: Sequence[DeviceLine], members: Sequence[DeviceLine]
) -> tuple[frozenset[str], BatchSeconds]:
    """Return the members that train, and the forecast: the same as before, unless others are
    clearly better. While nothing is known of their work, those before the first slow line train."""
    sets = _candidates(members)
    if not any(each.group for each in members):
        quick = {each.worker.address for each in members if sum(each.line) <= MAX_UNKNOWN_S}
        return sets[:2][-1] | quick, BatchSeconds(math.inf, math.inf)
    forecasts = {each: batch_seconds(plan, fluid, lines, each) for each in sets}
    best = min(forecasts, key=lambda each: forecasts[each].total)
    before = frozenset(each.worker.address for each in members if not each.worker.no_pieces)
    if not before:
        return best, forecasts[best]
    known = forecasts.get(before) or batch_seconds(plan, fluid, lines, before)
    margin = (MIN_GAIN if best - before else MIN_LOSS) * known.total
    if forecasts[best].total < known.total - margin:
        return best, forecasts[best]
    return before, known


def _candidates(members: Sequence[DeviceLine]) -> list[frozenset[str]]:
    """Return the sets of members that could train: all, and those before each slow line."""
    ordered = sorted(members, key=lambda each: (sum(each.line), each.worker.address))
    addresses = [each.worker.address for each in ordered]
    found, limit = [frozenset(addresses)], 0.0
    for number, each in enumerate(ordered[1:], 1):
        usual, seconds = sum(ordered[(number - 1) // 2].line), sum(each.line)
        if seconds > max(limit, SLOW_LINE_FACTOR * usual):
            found.append(frozenset(addresses[:number]))
            limit = SAME_LINE_FACTOR * seconds
    return found


def batch_seconds(
    plan: Plan, fluid: FluidState, lines: Sequence[DeviceLine], training: Collection[str]
) -> BatchSeconds:
    """Forecast a batch in which these members train, and all devices generate that do so."""
    members = [each for each in lines if each.worker.address in training]
    generated = _generated(plan, _rates(lines, training))
    rate = sum(1 / each.group for each in members if each.group)
    trained = plan.num_groups / rate if rate else 0.0
    committer = min((each.line for each in members), key=lambda line: line.up)
    num_sums = group_members(fluid, training).num_sums
    exchanged = plan.updates * round_seconds([m.line for m in members], committer, num_sums)
    work = generated + trained
    if has_loans(plan) and not any(math.isfinite(each.sample) for each in members):
        work = max(generated + trained / plan.num_groups, trained)
    if not plan.early_groups:
        return BatchSeconds(work if has_loans(plan) else generated, work + exchanged)
    begun = min((each.latency for each in members if math.isfinite(each.sample)), default=0.0)
    return BatchSeconds(work, max(work, begun + trained + exchanged))


def _rates(lines: Sequence[DeviceLine], training: Collection[str]) -> Sequence[tuple[float, float]]:
    """Return when each device has the version, and its samples per second from then on: sorted."""
    return sorted(
        (0.0 if each.worker.address in training else each.version, 1 / each.sample)
        for each in lines
        if 0 < each.sample < math.inf
    )


def _late_gain(plan: Plan, rates: Sequence[tuple[float, float]], wait: float) -> float:
    """Return the seconds that devices with this wait save, over those without the wait."""
    earlier = [each for each in rates if each[0] < wait]
    late = [each for each in rates if each[0] == wait]
    alone = _generated(plan, earlier)
    possible = alone - _generated(plan, [*((0.0, rate) for _, rate in late), *earlier])
    gain = alone - _generated(plan, [*earlier, *late])
    return gain / possible if alone and possible > 0 else 1.0


def _generated(plan: Plan, rates: Sequence[tuple[float, float]]) -> float:
    """Return when all samples are generated."""
    left, rate, now = float(plan.num_groups * plan.group_size), 0.0, 0.0
    for wait, faster in rates:
        if rate and left <= rate * (wait - now):
            break
        left, rate, now = left - rate * (wait - now), rate + faster, wait
    return now + left / rate if rate else 0.0


def _decided(
    plan: Plan,
    line: DeviceLine,
    trains: bool,
    seconds: BatchSeconds,
    size: int,
    rates: Sequence[tuple[float, float]],
) -> WorkerState:
    """Return a device with the reasons for which it gets no pieces, or no fragments."""
    worker = line.worker
    is_member = math.isfinite(line.group)
    no_pieces, no_fragments, share = worker.no_pieces, "", 1.0
    if trains or not is_member:
        no_pieces = ""
    elif not (has_loans(plan) and worker.concurrency):  # it is lent, and comes back first
        way_up = line.line.up, size * min_share(plan.schedule.up)
        took, sent = max(way_up, (line.line.down, size))
        mbits = 8e-6 * sent / took
        no_pieces = f"its sums would take {_figure(took)} s at {_figure(mbits)} Mbit/s"
    wait = 0.0 if is_member and not no_pieces else line.version
    end, margin = seconds.end, MIN_GAIN if worker.no_fragments else 0.0
    if worker.concurrency and wait > MIN_LOSS * end:
        share = max(MIN_LOSS, 1 - wait / end)
        is_late = wait + line.latency >= end * (1 - margin)
        if is_late or _late_gain(plan, rates, wait) < MIN_LATE_GAIN + margin:
            no_fragments = f"a version takes {_figure(wait)} s to arrive"
    return replace(worker, no_pieces=no_pieces, no_fragments=no_fragments, share=share)


def _figure(value: float) -> str:
    return f"{value:,.{0 if value >= 10 else 1}f}"
