"""Plans for devices of which some are too small for the model as it is.

Each placement lets more kinds of device take part than those before it, by the remedies of
`planning.remedies`, in their order. Where a kind streams the network's blocks, quantised weights
would do instead: that placement is planned as well. A placement replaces one before it only if its
step is clearly faster, so weights stay exact unless that costs time.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, get_args

from digenrl.planning.hosts import Hosts
from digenrl.planning.planner import PlanResult, plan_split
from digenrl.planning.remedies import keys, memory_remedy, sharded_uses, smaller_rollout_uses
from digenrl.planning.runnable import HostGpus, as_toml
from digenrl.planning.search import SEARCH_CPU_S
from digenrl.planning.sites import SiteAdvice
from digenrl.trace.memory import ModelUse, encoder_needs, rollout_needs, with_memory
from services.scheduler.costs.capacity import TARGET_ROWS, pass_rows
from services.scheduler.costs.profile import Profile, Role, device
from services.scheduler.costs.seconds import speed, transfer_seconds
from services.scheduler.costs.split import Devices, Split, present
from shared.errors import UserError
from shared.recipe.recipe import Recipe
from shared.recipe.schedule import RunSchedule

ROLES: tuple[Role, ...] = get_args(Role)
WORDS: Mapping[Role, str] = {"rollout": "generate", "trainer": "train"}
MAX_RELATIVE_SECONDS = 0.97
"""A placement is taken if its step takes less than this share of the one before: simulations of few
batches differ by a per cent."""
STREAMED = "DIGENRL_ROLLOUT_MEMORY"
"""Variable by which a worker streams though its recipe does not stream on all."""


@dataclass(frozen=True, slots=True)
class ModelPlacement:
    """How devices hold the model."""

    profile: Profile
    """Costs and memory of a run that holds it so."""
    use: ModelUse | None
    """None if the profile has no table of memory."""
    keys: Mapping[str, Any]
    """Recipe keys of the placement, besides the split."""

    def recipe_keys(self, split: Split, schedule: RunSchedule) -> dict[str, Any]:
        """Return the keys that a split needs: `rollout.memory` if all that generate stream, and how
        the clip treats stale samples of quantised weights."""
        keys = dict(self.keys)
        if self._streaming(split) and not self.environment(split):
            keys["rollout.memory"] = "streamed"
        if "rollout.weights" in keys and schedule.staleness_limit:
            keys["algorithm.stale_loss"] = "decoupled"
        return keys

    def environment(self, split: Split) -> dict[str, dict[str, str]]:
        """Return variables for the workers of some kinds, where not all that generate stream."""
        kinds = self._streaming(split)
        if kinds == [kind for kind, count in split.rollout.items() if count]:
            return {}
        return {kind: {STREAMED: "streamed"} for kind in kinds}

    def _streaming(self, split: Split) -> list[str]:
        if self.use is None or self.use.streams:  # the recipe says it already
            return []
        return [kind for kind, n in split.rollout.items() if n and kind in self.profile.streaming]


@dataclass(frozen=True, slots=True)
class PlacementAdvice:
    """Holds a plan, and why the model is held as it is."""

    planned: PlanResult
    placement: ModelPlacement
    left_out: tuple[str, ...]
    """A line for each kind that takes no part, with what would let it."""
    reasons: tuple[str, ...]
    """A line for each kind that would take no part otherwise, and for each placement not taken."""
    hosts: Hosts | None = None
    """Where the devices are, if that is known."""
    recipe: Recipe | None = None
    """The planned recipe, if there is one."""
    sites: tuple[SiteAdvice, ...] = ()
    """Work of the devices behind lines."""


def advise(
    costs: Profile, use: ModelUse | None, devices: Devices, schedule: RunSchedule, *,
    host_gpus: HostGpus | None = None, effort: float = SEARCH_CPU_S,
    accepts: Callable[["ModelPlacement", Split, RunSchedule], bool] | None = None,
    fluid: bool = False,
) -> PlacementAdvice:  # fmt: skip
    """Plan every placement that is worth a look, and take the first that none beats clearly.

    Args:
        accepts: whether the planned recipe can express it; otherwise as `plan_split`.

    Raises:
        UserError: if no placement has a split, with what would fit.
    """
    tried: list[tuple[ModelPlacement, PlanResult]] = []
    failed: UserError | None = None
    for placement in placements(costs, use, devices):
        try:
            planned = plan_split(
                placement.profile, devices, schedule, effort=effort, host_gpus=host_gpus,
                accepts=None if accepts is None else partial(accepts, placement), fluid=fluid,
            )  # fmt: skip
        except UserError as error:
            failed = failed or error
            continue
        tried.append((placement, planned))
    if not tried:
        raise UserError(_with_remedies(str(failed), costs, use, devices)) from failed
    chosen, best = _first_unbeaten(tried)
    others = [(placement, planned) for placement, planned in tried if placement is not chosen]
    return PlacementAdvice(
        best,
        chosen,
        left_out=tuple(_left_out(best, costs, chosen.use)),
        reasons=(*_held(chosen, best), *(_not_taken(*each, best) for each in others)),
    )


def _first_unbeaten(
    tried: Sequence[tuple[ModelPlacement, PlanResult]],
) -> tuple[ModelPlacement, PlanResult]:
    chosen, best = tried[0]
    for placement, planned in tried[1:]:
        if planned.best.step_seconds < MAX_RELATIVE_SECONDS * best.best.step_seconds:
            chosen, best = placement, planned
    return chosen, best


def placements(costs: Profile, use: ModelUse | None, devices: Devices) -> Iterator[ModelPlacement]:
    """Yield the model as it is, and placements by which more kinds of device take part, or the same
    without streaming or with more rows of a training pass, where these are few. Weights are shared
    by groups only if no kind holds all that it takes to generate and to train."""
    if use is None or costs.memory is None:
        yield ModelPlacement(costs, None, {})
        return
    most: set[tuple[str, Role]] = set()
    streamed, rows = False, 0
    whole = replace(use, ranks=1)
    for shared in (whole, *sharded_uses(whole)):
        if shared is not whole and any(role == "member" for _, role in most):
            return
        for wanted in (shared, *smaller_rollout_uses(shared)):
            profile, sized_profile = _on(costs, shared, wanted, list(present(devices)))
            able = _able(profile, devices)
            quantised, more = sized_profile.weights != use.weights, _rows(profile, able)
            better = (streamed and quantised) or rows < min(TARGET_ROWS, more)
            if wanted is whole or able > most or (better and able == most):
                most, streamed = able, bool(profile.streaming) and not use.streams
                rows = more
                yield ModelPlacement(profile, sized_profile, keys(use, sized_profile))


def _rows(profile: Profile, able: set[tuple[str, Role]]) -> int:
    """Return the rows of a training pass on the kind of member that has the fewest."""
    kinds = {kind for kind, role in able if role == "member"}
    return min((pass_rows(profile, kind, "member") for kind in kinds), default=0)


def _able(profile: Profile, devices: Devices) -> set[tuple[str, Role]]:
    """Return what devices of each kind can do; as ranks, if there are enough for a group."""
    return {
        (kind, role)
        for kind, count in present(devices).items()
        for role in ROLES
        if speed(profile, kind, role) and (role == "rollout" or count >= profile.variant.ranks)
    }


def _on(
    costs: Profile, use: ModelUse, wanted: ModelUse, kinds: list[str]
) -> tuple[Profile, ModelUse]:
    """Return the costs of a use in which only those kinds stream that would not fit otherwise."""
    if use.streams or not wanted.streams:
        return with_memory(costs, wanted), wanted
    resident = replace(wanted, streams=False)
    sized_profile = with_memory(costs, resident)
    small = [kind for kind in kinds if not speed(sized_profile, kind, "rollout")]
    streaming = with_memory(costs, resident, small)
    able = [kind for kind in small if speed(streaming, kind, "rollout")]
    return with_memory(costs, resident, able), resident


def _held(placement: ModelPlacement, planned: PlanResult) -> Iterator[str]:
    """Describe how the kinds generate that the original profile leaves out."""
    profile, use, split = placement.profile, placement.use, planned.best.split
    memory = profile.memory
    if use is None or memory is None or not (placement.keys or placement.environment(split)):
        return
    if "encoder.workers" in placement.keys:
        text = encoder_needs(memory, use)
        yield f"a process of its own encodes prompts, on a device that is left or a CPU: {text}"
    for kind, count in split.rollout.items():
        if not count:
            continue
        streams = kind in profile.streaming
        needed = rollout_needs(memory, replace(use, streams=streams))
        line = f"{kind} generates with {needed}; it has {device(profile, kind).memory_gib:g}"
        if streams:
            line += f"; {_pace(profile, kind, planned)}"
        yield line


def _pace(profile: Profile, kind: str, planned: PlanResult) -> str:
    size = planned.best.schedule.fixed_fragment or profile.shape.group_size
    gpu = device(profile, kind)
    computes = profile.step_seconds(size) / gpu.generation_speed
    waits = transfer_seconds(profile, kind, "rollout")
    slower = "which hides" if waits <= computes else "which does not hide"
    return (
        f"a step of {size} samples computes {computes:.2g} s, {slower} the {waits:.2g} s in which "
        f"its weights come at {gpu.host_gb_per_second:g} GB/s"
    )


def _not_taken(placement: ModelPlacement, planned: PlanResult, best: PlanResult) -> str:
    seconds, least = planned.best.step_seconds, best.best.step_seconds
    keys = placement.recipe_keys(planned.best.split, planned.best.schedule)
    name = f"with {as_toml(keys)}" if keys else "as it is"
    text = (
        "slower"
        if seconds > least
        else "no faster"
        if seconds > MAX_RELATIVE_SECONDS * least
        else "faster"
    )
    return f"{name}: {seconds:.4g} s per step, {text}"


def _left_out(planned: PlanResult, costs: Profile, use: ModelUse | None) -> Iterator[str]:
    for kind, reason in planned.excluded.items():
        remedy = "" if use is None else memory_remedy(costs, use, kind, "rollout")
        yield f"{reason}; {remedy}" if remedy else reason


def _with_remedies(reason: str, costs: Profile, use: ModelUse | None, devices: Devices) -> str:
    """Add what would let the largest kind generate or train, where none can."""
    kinds = [kind for kind, count in devices.items() if count and kind in costs.devices]
    if use is None or not kinds:
        return reason
    sized_profile = with_memory(costs, use)
    largest = max(kinds, key=lambda k: costs.devices[k].memory_gib)
    for role, words in WORDS.items():
        remedy = memory_remedy(costs, use, largest, role)
        if remedy and not any(speed(sized_profile, kind, role) for kind in kinds):
            reason += f"; to {words} on {largest}, {remedy}"
    return reason
