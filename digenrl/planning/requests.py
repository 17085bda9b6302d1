"""``digenrl plan`` and ``digenrl sim``: what is asked for, checked; `planning_output` shows it."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pydantic import ValidationError

from digenrl.planning.output import Comparison
from services.scheduler.costs.colocated import colocated_seconds
from services.scheduler.costs.memory import usual, with_memory
from services.scheduler.costs.profile import PROFILES, Profile, VariantName, load_profile
from services.scheduler.planning.lookahead import look_ahead
from services.scheduler.planning.planner import BASELINES, Planned, plan_split
from services.scheduler.planning.recipes import (
    profile_of,
    schedule_of,
    use_of,
    with_shape_of,
    with_staleness,
)
from services.scheduler.planning.splits import Split
from services.scheduler.planning.techniques import Technique, compare
from services.scheduler.sim.profiled import ScheduleChoice, simulate
from shared.errors import UserError
from shared.recipe.errors import describe
from shared.recipe.recipe import Recipe, Schedule, load_recipe

MAX_DEVICES = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class SimRequest:
    """The options of ``digenrl sim``, as they were typed."""

    profile: str
    variant: VariantName
    rollout: str
    trainer: str
    mode: str
    staleness: Literal[0, 1]
    tag: str
    fragment_size: str
    tsp: bool
    batches: int
    seed: int


def plan(
    recipe: Path | None,
    devices: str,
    *,
    profile: str | None,
    variant: VariantName,
    staleness: Literal[0, 1] | None,
    host_gpus: int,
) -> Planned:
    """What ``digenrl plan`` finds out: only what a recipe can say, of hosts with so many GPUs.

    Raises:
        UserError: one line that names the option and the remedy.
    """
    if variant == "full":
        raise UserError(
            "--variant: costs of all weights are those of bfloat16, and a run trains them in "
            "float32; leave it out, or look at one split with digenrl sim"
        )
    if recipe is None:
        if profile is None:
            raise UserError("give a recipe, or --profile; known are " + ", ".join(known_profiles()))
        costs = load_profile(profile, variant)
        if costs.memory is not None:
            costs = with_memory(costs, usual(costs.memory))
        schedule = ScheduleChoice(tag="auto")
    else:
        loaded = load_recipe(recipe)
        costs = costs_of(loaded, profile or profile_of(loaded, known_profiles()))
        schedule = schedule_of(loaded)
    schedule = with_staleness(schedule, staleness)
    kinds = parse_devices("--devices", devices, costs)
    return plan_split(costs, kinds, schedule, host_gpus=host_gpus)


def costs_of(recipe: Recipe, profile: str, *, fragment: int = 1) -> Profile:
    """The profile's costs for this recipe's batch, with the memory that its model and its shape
    take, in fragments of so many samples.

    Raises:
        UserError: if there is no such profile, or its costs are not those of this recipe.
    """
    if recipe.model.trained == "full":
        raise UserError(
            "model.trained: costs of all weights are those of bfloat16, and a run trains them in "
            'float32; only "lora" can be planned'
        )
    costs = with_shape_of(load_profile(profile), recipe)
    return with_memory(costs, use_of(recipe, costs, fragment=fragment))


def simulated(request: SimRequest, *, comparing: bool) -> Comparison:
    """What ``digenrl sim`` finds out: of one configuration, or of every technique in turn.

    Raises:
        UserError: one line that names the option and the remedy.
    """
    profile = load_profile(request.profile, request.variant)
    split = Split(
        parse_devices("--rollout", request.rollout, profile),
        parse_devices("--trainer", request.trainer, profile),
    )
    schedule = _schedule_of(request, profile)
    if comparing:
        rows = compare(
            profile,
            split,
            fragment_size=schedule.fragment_size,
            batches=request.batches,
            seed=request.seed,
        )
    else:
        found = simulate(
            profile,
            rollout=split.rollout,
            trainer=split.trainer,
            schedule=schedule,
            batches=request.batches,
            seed=request.seed,
            look_ahead=look_ahead,
        )
        rows = [Technique(request.mode, schedule, found)]
    colocated = {each: colocated_seconds(profile, split.devices, each) for each in BASELINES}
    return Comparison(profile, split, colocated, tuple(rows))


def parse_devices(option: str, text: str, profile: Profile) -> dict[str, int]:
    """``h100=16,a100=16`` as {"H100": 16, "A100": 16}.

    Raises:
        UserError: one line that names the option, what is wrong, and the remedy.
    """
    known = {kind.lower(): kind for kind in profile.devices}
    devices: dict[str, int] = {}
    for part in text.split(","):
        kind, equals, count = (piece.strip() for piece in part.partition("="))
        if not equals or not kind:
            raise UserError(f"{option}: {part!r} is not kind=count, e.g. h100=16,a100=16")
        if not count.isdecimal() or int(count) == 0:
            raise UserError(f"{option}: {part!r}: the count is a whole number, 1 or more")
        name = known.get(kind.lower())
        if name is None:
            kinds = ", ".join(profile.devices)
            raise UserError(f"{option}: {profile.name} knows no {kind}; known are {kinds}")
        if name in devices:
            raise UserError(f"{option}: {name} is given twice; add the counts")
        devices[name] = int(count)
    if sum(devices.values()) > MAX_DEVICES:
        raise UserError(f"{option}: more than {MAX_DEVICES} devices; plan for a part of them")
    return devices


def known_profiles() -> list[str]:
    return sorted(path.stem for path in PROFILES.glob("*.json"))


def _schedule_of(request: SimRequest, profile: Profile) -> ScheduleChoice:
    size = _number("--fragment-size", request.fragment_size, ("auto",))
    group = profile.shape.group_size
    if size is not None and (size == 0 or group % size):
        sizes = ", ".join(str(n) for n in range(1, group + 1) if group % n == 0)
        raise UserError(f"--fragment-size: {size} does not divide the group; these do: {sizes}")
    groups = _number("--tag", request.tag, ("auto", "off"))
    if groups is not None and groups > profile.shape.groups:
        raise UserError(f"--tag: {groups} groups of {profile.shape.groups}; at most all of them")
    if request.batches < 1:
        raise UserError("--batches: at least 1")
    tag: int | Literal["auto"] = "auto" if request.tag == "auto" else groups or 0
    mode = _mode(request.mode)
    schedule = ScheduleChoice(
        mode=mode,
        fragment_size=size,
        tsp=request.tsp,
        tag=0 if mode == "sequential" else tag,
    )
    return with_staleness(schedule, request.staleness)


def _mode(text: str) -> Literal["pipelined", "sequential"]:
    try:
        mode = Schedule.model_validate({"mode": text}).mode
    except ValidationError as error:
        raise UserError(f"--{describe(error, Schedule)}") from error
    if mode == "colocated":
        raise UserError("--mode: colocated has no split; the output says what that takes")
    return mode


def _number(option: str, text: str, words: tuple[str, ...]) -> int | None:
    """None for one of the words."""
    if text in words:
        return None
    if not text.isdecimal():
        raise UserError(f"{option}: {text!r} is neither a number nor {' nor '.join(words)}")
    return int(text)
