"""Forecasts the step time and the memory of a recipe on given devices."""

from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from digenrl.planning.encoding import encoding_line
from digenrl.planning.entries import Processes, make_ledger
from digenrl.planning.hosts import (
    Hosts,
    add_kinds,
    check_host_memory,
    host_memory_line,
    parse_hosts,
)
from digenrl.planning.ledger import Card
from digenrl.planning.own_split import OwnSplit, own_split
from digenrl.planning.pass_rows import rows_lines
from digenrl.planning.placements import ModelPlacement
from digenrl.planning.plan import accepts, parse_kinds, with_host, with_weights
from digenrl.planning.planner import PlannedSplit, plan_split
from digenrl.planning.recipes import largest_fragment, model_use
from digenrl.planning.remedies import memory_remedy
from digenrl.planning.runnable import as_toml, recipe_keys
from digenrl.planning.scoring import Scoring, check_scoring, score_costs
from digenrl.planning.work import sample_seconds, work_line
from digenrl.trace.memory import (
    DeviceMemory,
    ModelUse,
    encoder_needs,
    member_needs,
    rollout_needs,
    trainer_needs,
    with_memory,
)
from digenrl.trace.profile import traced_profile
from digenrl.trace.record import Trace
from services.scheduler.costs.devices import notes
from services.scheduler.costs.profile import Profile, load_profile
from services.scheduler.costs.recipes import fit_to_recipe, profile_for
from services.scheduler.costs.split import Devices, words
from services.scheduler.sim.measured import SimulationResult
from services.scheduler.sim.profiled import simulate
from services.scheduler.sim.staleness import StalenessDecision, decide, decide_at_start
from services.scheduler.sim.staleness import line as staleness_line
from services.scheduler.sim.steady import steady_fragment_size
from shared.errors import UserError
from shared.recipe.recipe import Recipe
from shared.recipe.schedule import RunSchedule

BATCHES_STRICT, BATCHES_ONE_STEP = 3, 6
SEARCH_CPU_S = 0.3
"""Effort of the search for a better split, which takes a second or less."""
MAX_RELATIVE_SECONDS = 0.97
"""A split is reported as faster if its step takes less than this share of the recipe's own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """Holds the forecast for one recipe on one set of devices."""

    recipe: Recipe
    profile: Profile
    own: OwnSplit
    simulated: SimulationResult | None
    """Simulation of the recipe; None if it was not asked for."""
    better: PlannedSplit | None
    """The planner's choice for the same devices, if it is faster."""
    needs: tuple["MemoryNeed", ...]
    """Memory that devices need, by what they do; empty if the profile has no memory table."""
    hosts: Hosts
    keeps_activations: bool
    """Whether training keeps its activations, for which the profile has no figures."""
    is_traced: bool
    """True if a trace gave the memory."""
    staleness: StalenessDecision | None
    """Decision for "auto" on these devices, if the recipe has it."""
    work: str
    """How the work is divided between generation and training."""
    scoring: Scoring | None
    """Location of the rewards' networks; None without networks, or if it is unknown."""
    pass_rows: tuple[str, ...]
    """How many rows training passes have, and what few of them cost."""

    @property
    def step_seconds(self) -> float | None:
        """Return the seconds of a step, which scoring may bound; None if it was not asked for."""
        if self.simulated is None:
            return None
        return max(self.simulated.step_seconds, self.scoring.seconds if self.scoring else 0.0)

    @property
    def needed(self) -> dict[str, DeviceMemory]:
        """Return role -> memory that each of its devices needs."""
        return {need.role: need.needed for need in self.needs}


@dataclass(frozen=True, slots=True)
class MemoryNeed:
    """Requirements of each device of a pool."""

    role: str
    """Role of the devices, as a name for programs."""
    words: str
    pool: Devices
    needed: DeviceMemory


def forecast(
    recipe: Recipe, devices: str, profile: str | None, *,
    host_gpus: int, option: str = "--devices", streamed: str | None = None,
    host_memory: str | None = None, timing: bool = True, trace: Trace | None = None,
    launch_us: str | None = None,
) -> Forecast:  # fmt: skip
    """Forecast the recipe's own split on the pool of ``option``, and find a faster split unless the
    recipe is colocated. The figures of a ``trace`` replace the profile's. Raises UserError if the
    devices are too few, too small or unknown."""
    costs = add_kinds(devices, fit_to_recipe(_costs(recipe, profile, trace), recipe))
    hosts = parse_hosts(option, devices, costs, host_gpus=host_gpus, host_memory=host_memory)
    costs = with_host(costs, launch_us)
    streams = parse_kinds("--streamed", streamed, hosts.devices) if streamed else ()
    use = model_use(recipe, costs, fragment=steady_fragment_size(recipe))
    costs = with_trace(costs, trace, use) if trace else with_weights(costs, recipe.model.folder)
    scoring = _scoring(recipe, costs, hosts)
    costs = _with_scoring(costs, scoring)
    sized_costs, use, own = _own_split(recipe, costs, use, streams, hosts)
    schedule, decision = recipe.run_schedule, None
    if recipe.schedule.max_staleness == "auto":
        decision = decide(recipe, sized_costs, own.split) or decide_at_start(recipe)
        schedule = schedule.changed(max_staleness=decision.max_staleness)
        own = replace(own, schedule=own.schedule.changed(max_staleness=decision.max_staleness))
    simulated = better = None
    if timing:
        simulated = _simulated(sized_costs, own)
        if scoring is not None:
            check_scoring(recipe, scoring, max(simulated.step_seconds, scoring.seconds))
        smallest = with_memory(costs, replace(use, fragment=1), streams)
        if own.schedule.mode in ("disaggregated", "fluid"):
            better = _faster(recipe, smallest, use, hosts, schedule, simulated.step_seconds)
    return Forecast(
        recipe=recipe, profile=sized_costs, own=own, simulated=simulated, better=better,
        needs=tuple(_needs(sized_costs, use, own)), hosts=hosts,
        keeps_activations=recipe.trainer.gradient_checkpointing in (False, "selective"),
        is_traced=trace is not None, staleness=decision, work=work_line(sized_costs, recipe),
        scoring=scoring, pass_rows=tuple(rows_lines(sized_costs, use, own)),
    )  # fmt: skip


def _with_scoring(costs: Profile, scoring: Scoring | None) -> Profile:
    """Return the profile with the forecast seconds of scoring in place of its own."""
    if scoring is None:
        return costs
    rollout = costs.rollout.model_copy(update={"reward_seconds": scoring.device_seconds})
    return costs.model_copy(update={"rollout": rollout})


def _own_split(
    recipe: Recipe, costs: Profile, use: ModelUse, streams: Collection[str], hosts: Hosts
) -> tuple[Profile, ModelUse, OwnSplit]:
    """Return the recipe's own split, in fragments of the size that a run would choose."""

    def split(use: ModelUse) -> tuple[Profile, OwnSplit]:
        sized_costs, remedy = with_memory(costs, use, streams), partial(memory_remedy, costs, use)
        return sized_costs, own_split(recipe, sized_costs, hosts.devices, remedy=remedy)

    sized_costs, own = split(replace(use, fragment=1))
    use = replace(use, fragment=largest_fragment(sized_costs, own.split, own.schedule))
    sized_costs, own = split(use)
    check_host_memory(sized_costs, hosts, own.split)
    return sized_costs, use, own


def _faster(
    recipe: Recipe, smallest: Profile, use: ModelUse, hosts: Hosts, schedule: RunSchedule,
    step_seconds: float,
) -> PlannedSplit | None:  # fmt: skip
    """Return a split that is clearly faster, if there is one."""
    best = plan_split(
        smallest, hosts.devices, schedule, effort=SEARCH_CPU_S, host_gpus=hosts.gpus, fluid=True,
        accepts=partial(accepts, recipe, hosts, ModelPlacement(smallest, use, {})),
    ).best  # fmt: skip
    return best if best.step_seconds < MAX_RELATIVE_SECONDS * step_seconds else None


def lines(expected: Forecast) -> Iterator[str]:
    """Describe a forecast for people."""
    split, name = expected.own.split, expected.profile.name
    who = f"generating {words(split.rollout)}, training {words(split.trainer)}"
    if not split.rollout:
        who = f"generating and training in turn: {words(split.trainer)}"
    if expected.simulated is not None:
        yield (
            f"by the cost profile {name}: {expected.step_seconds:.0f} s per step, devices "
            f"{expected.simulated.utilisation:.0%} at work; {who}"
        )
    if expected.scoring is not None and expected.step_seconds:
        share = expected.scoring.seconds / expected.step_seconds
        yield (
            f"the networks of the rewards: {expected.scoring.seconds:.3g} s per step ({share:.0%}) "
            f"{expected.scoring.place}"
        )
    yield from notes(expected.profile.devices, expected.hosts.devices)
    if expected.staleness is not None:
        yield staleness_line(expected.staleness)
    if expected.better is not None:
        yield (
            f"faster on the same devices: {expected.better.step_seconds:.0f} s per step with "
            f"{as_toml(better_keys(expected))}"
        )
    if expected.simulated is not None:
        yield expected.work
    yield from _memory_lines(expected)
    yield from expected.pass_rows
    if (line := encoding_line(expected.recipe, expected.profile)) is not None:
        yield line


def _memory_lines(expected: Forecast) -> Iterator[str]:
    """Describe the memory that devices and their hosts need."""
    for need in expected.needs:
        has = ", ".join(
            f"{kind} has {expected.profile.devices[kind].memory_gib:g}" for kind in need.pool
        )
        how = "traced" if expected.is_traced else "an estimate"
        yield f"memory to {need.words}, {how}: {need.needed}{has and f'; {has}'}"
    host_memory = host_memory_line(expected.profile, expected.hosts, expected.own.split)
    if host_memory is not None:
        yield host_memory
    if expected.needs and expected.keeps_activations and not expected.is_traced:
        yield (
            "memory to train assumes trainer.gradient_checkpointing = true; without it, the "
            "activations of a row take several times as much"
        )


def as_dict(expected: Forecast) -> dict[str, Any]:
    """Describe a forecast for programs."""
    own, simulated, better = expected.own, expected.simulated, expected.better
    return {
        "profile": expected.profile.name,
        "rollout": dict(own.split.rollout),
        "trainer": dict(own.split.trainer),
        "step_seconds": None if expected.step_seconds is None else round(expected.step_seconds, 3),
        "utilisation": None if simulated is None else round(simulated.utilisation, 4),
        "seconds_per_sample": sample_seconds(expected.profile),
        "scoring": None
        if expected.scoring is None
        else {"step_seconds": round(expected.scoring.seconds, 3), "place": expected.scoring.place},
        "max_staleness": expected.own.schedule.staleness_limit,
        "better": None
        if better is None
        else {"step_seconds": round(better.step_seconds, 3), "recipe": better_keys(expected)},
        "memory_gib": {
            need.role: {
                part: round(getattr(need.needed, part), 2)
                for part in ("network", "text", "decoder", "trained", "peak", "total", "host")
            }
            for need in expected.needs
        },
    }


def better_keys(expected: Forecast) -> dict[str, Any]:
    """Return the recipe keys of the faster split."""
    assert expected.better is not None
    return recipe_keys(expected.better.split, expected.better.schedule, recipe=expected.recipe)


def has_profile(recipe: Recipe) -> bool:
    """Return whether a cost profile has the model's network."""
    try:
        profile_for(recipe)
    except UserError:
        return False
    return True


def _scoring(recipe: Recipe, costs: Profile, hosts: Hosts) -> Scoring | None:
    """Return what scoring takes where `digenrl up` would have it on such hosts."""
    cards = [
        Card(f"{host}:{number}", kind, costs.devices[kind].memory_gib)
        for host, kind, gpus in hosts.named()
        for number in range(gpus)
    ]
    ledger = make_ledger(recipe, cards, costs, Processes.of_run(recipe))
    return None if ledger is None else score_costs(recipe, costs, ledger)


def _costs(recipe: Recipe, name: str | None, trace: Trace | None) -> Profile:
    """Return the profile of that name, or of the model's network, or a profile counted by a
    trace."""
    if name is None and trace is not None and trace.counted is not None and not has_profile(recipe):
        traced = traced_profile(recipe, trace)
        return traced.trained(traced.variants["lora"])
    return load_profile(name or profile_for(recipe), recipe.model.trained)


def with_trace(profile: Profile, trace: Trace, use: ModelUse) -> Profile:
    """Return the profile with what was traced in place of its own figures; what tiles would save of
    a decoder that was traced without them is the profile's estimate."""
    variant = profile.variant.model_copy(update={"rho": trace.rho})
    memory, launches = trace.memory(fragment=use.fragment), trace.launches
    if profile.memory is not None and not use.tiles:
        ratio = profile.memory.tiled_gib / profile.memory.decode_gib
        memory = memory.model_copy(update={"tiled_gib": memory.tiled_gib * ratio})
    return profile.model_copy(update={"memory": memory, "variant": variant, "launches": launches})


def _simulated(profile: Profile, own: OwnSplit) -> SimulationResult:
    return simulate(
        profile,
        rollout=own.split.rollout,
        trainer=own.split.trainer,
        schedule=own.schedule,
        batches=BATCHES_ONE_STEP if own.schedule.max_staleness else BATCHES_STRICT,
    )


def _needs(profile: Profile, use: ModelUse, own: OwnSplit) -> Iterator[MemoryNeed]:
    memory, split = profile.memory, own.split
    if memory is None:
        return
    resident = {kind: n for kind, n in split.rollout.items() if kind not in profile.streaming}
    streaming = {kind: n for kind, n in split.rollout.items() if kind in profile.streaming}
    if resident:
        yield MemoryNeed("generate", "generate", resident, rollout_needs(memory, use))
    if streaming:
        needed = rollout_needs(memory, replace(use, streams=True))
        words = "generate with a streamed network"
        yield MemoryNeed("generate_streamed", words, streaming, needed)
    group = f" as one of {use.ranks} that share the weights" if use.ranks > 1 else ""
    role = "fluid" if own.schedule.members_generate else "train"
    if own.schedule.trainer_generates:
        words = f"generate and train{group}"
        yield MemoryNeed(role, words, split.trainer, member_needs(memory, use))
    else:
        yield MemoryNeed(role, f"train{group}", split.trainer, trainer_needs(memory, use))
    if not use.encodes:
        yield MemoryNeed("encode", "encode prompts", {}, encoder_needs(memory, use))
