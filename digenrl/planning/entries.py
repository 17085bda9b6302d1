"""The processes of a run on one host, as entries of its ledger."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from digenrl.planning.ledger import CONTEXT_GIB, Card, CardShare, Ledger, Policy, share_out
from digenrl.planning.recipes import model_use
from digenrl.planning.scoring import GPU_TFLOPS, image_tflop
from digenrl.trace.memory import ModelUse, encoder_needs, member_needs, rollout_needs, trainer_needs
from services.reward.kinds import may_load_a_network, scorer_network
from services.reward.networks import WORK_GIB
from services.scheduler.costs.capacity import TARGET_ROWS
from services.scheduler.costs.profile import Profile
from services.scheduler.costs.sizes import Memory
from services.scheduler.sim.steady import steady_fragment_size
from shared.errors import UserError
from shared.messages.rights import Role
from shared.recipe.recipe import Recipe
from shared.recipe.rewards import ScorerTable

EVALUATOR = "evaluator"
POLICY_ROLES: tuple[Role, ...] = ("trainer", "rollout")
"""Roles that hold the network, and a GPU to themselves."""
OTHER_ROLES: tuple[Role, ...] = ("reward", "encoder")


@dataclass(frozen=True, slots=True)
class Processes:
    """Counts the processes of a run on one host."""

    counts: Mapping[Role, int]
    """Workers of each role; of trainers the members, each a process or a shard group."""
    has_evaluator: bool = False

    @classmethod
    def of_run(cls, recipe: Recipe) -> "Processes":
        """Return all processes of a run, as `digenrl up` starts them."""
        trainer = recipe.trainer
        counts: dict[Role, int] = {
            "rollout": recipe.rollout.workers,
            "encoder": recipe.encoder.workers,
            "reward": recipe.reward.workers,
            "trainer": trainer.devices // trainer.shard_devices,
        }
        return cls(counts, has_evaluator=recipe.evaluation.every is not None)

    def names(self, role: Role) -> list[str]:
        return [f"{role}-{number}" for number in range(self.counts.get(role, 0))]

    @property
    def workers(self) -> list[str]:
        return [name for role in self.counts for name in self.names(role)]


def host_processes(recipe: Recipe, roles: Collection[Role], num_cards: int) -> Processes:
    """Return the processes of a host among others: one per GPU that trains or generates, on a CPU
    one of each role. Where a host does both, its first GPUs train; all do if rollout.workers is 0.

    Raises:
        UserError: if this host cannot do any of it.
    """
    on_cpu, ranks = recipe.model.device == "cpu", recipe.trainer.shard_devices
    trains = "trainer" in roles
    generates = "rollout" in roles and not (trains and recipe.rollout.workers == 0)
    counts = {role: getattr(recipe, role).workers for role in OTHER_ROLES if role in roles}
    if trains or generates:
        devices = (trains + generates) * ranks if on_cpu else num_cards
        counts |= _policy_counts(recipe, devices, trains=trains, generates=generates)
    if not any(counts.values()):
        raise UserError(
            f"--roles: the recipe has no work for {', '.join(roles)}; encoder.workers is "
            f"{recipe.encoder.workers}"
        )
    return Processes(counts)


def _policy_counts(
    recipe: Recipe, devices: int, *, trains: bool, generates: bool
) -> dict[Role, int]:
    """Raises UserError if the devices are too few."""
    ranks = recipe.trainer.shard_devices
    least = ranks * trains + generates
    if devices < least:
        raise UserError(
            f"--roles, --gpus: {least} GPUs needed on this host "
            f"({ranks} for a member{', 1 to generate' * generates}), {devices or 'none'} found"
            if trains
            else "--gpus: this host has no GPU, and model.device is not cpu"
        )
    most = recipe.trainer.devices // ranks if generates else devices // ranks
    members = min(most, (devices - generates) // ranks) if trains else 0
    return {"trainer": members, "rollout": devices - members * ranks if generates else 0}


def make_ledger(
    recipe: Recipe, cards: Sequence[Card], profile: Profile | None, processes: Processes
) -> Ledger | None:
    """Return where the processes of a host run; None if cards are too few for the policies.

    Args:
        profile: costs of the recipe's model; without its table of memory nothing is shared.
    """
    memory = None if profile is None else profile.memory
    memory_use = None
    if profile is not None and memory is not None:
        memory_use = memory, model_use(recipe, profile, fragment=steady_fragment_size(recipe))
    policies = make_policies(recipe, memory_use, processes)
    return share_out(cards, policies, make_shares(recipe, memory_use, processes))


HeldMemory = tuple[Memory, ModelUse]


def make_policies(
    recipe: Recipe, memory_use: HeldMemory | None, processes: Processes
) -> list[Policy]:
    """Return members and rollout workers, with their share of a card if ``memory_use`` has it."""
    ranks = recipe.trainer.shard_devices
    least, wanted = _member_gib(recipe, memory_use)
    rollout = None if memory_use is None else CONTEXT_GIB + rollout_needs(*memory_use).total
    return [
        *(Policy(name, least, wanted, ranks) for name in processes.names("trainer")),
        *(Policy(name, rollout, rollout) for name in processes.names("rollout")),
    ]


def _member_gib(
    recipe: Recipe, memory_use: HeldMemory | None
) -> tuple[float, float] | tuple[None, None]:
    if memory_use is None:
        return None, None
    memory, use = memory_use
    needs = member_needs if recipe.run_schedule.trainer_generates else trainer_needs
    rows = min(TARGET_ROWS, recipe.trained_samples * recipe.sampling.window)
    wanted = needs(memory, replace(use, rows=max(use.rows, rows))).total
    return CONTEXT_GIB + needs(memory, use).total, CONTEXT_GIB + wanted


def make_shares(
    recipe: Recipe, memory_use: HeldMemory | None, processes: Processes
) -> list[CardShare]:
    """Return the processes that may share a card, in the order in which they are placed."""
    evaluator = _evaluator(recipe, memory_use) if processes.has_evaluator else []
    return [
        *_rewards(recipe, processes.names("reward")),
        *_encoders(recipe, memory_use, processes.names("encoder")),
        *evaluator,
    ]


def _rewards(recipe: Recipe, names: Sequence[str]) -> list[CardShare]:
    table = recipe.reward
    if not any(may_load_a_network(scorer.type) for scorer in table.scorers):
        return []
    samples = recipe.batch.groups * recipe.batch.group_size
    seconds = samples * image_tflop(recipe, on_gpu=True) / GPU_TFLOPS / table.workers
    gib = _networks_gib(table.scorers)
    return [
        CardShare(name, None if gib is None else CONTEXT_GIB + WORK_GIB + gib, seconds)
        for name in names
    ]


def _networks_gib(scorers: Sequence[ScorerTable]) -> float | None:
    """Return what the networks of scorers hold; None if a package or a user's function may have
    one."""
    total = 0.0
    for scorer in scorers:
        network = scorer_network(scorer.type, scorer.folder)
        if network is None and may_load_a_network(scorer.type):
            return None
        total += 0.0 if network is None else network.gib
    return total


def _encoders(
    recipe: Recipe, memory_use: HeldMemory | None, names: Sequence[str]
) -> list[CardShare]:
    if recipe.encoder.device is not None:
        return []
    gib = None if memory_use is None else CONTEXT_GIB + WORK_GIB + encoder_needs(*memory_use).total
    return [CardShare(name, gib) for name in names]


def _evaluator(recipe: Recipe, memory_use: HeldMemory | None) -> list[CardShare]:
    """Return the evaluator: it encodes before it loads the network, on the CPU if it streams the
    network, and then judges as well."""
    judges = _networks_gib((*recipe.reward.scorers, *recipe.evaluation.scorers))
    if memory_use is None or judges is None:
        return [CardShare(EVALUATOR, None)]
    memory, use = memory_use

    def gib(*, streams: bool) -> float:
        alone = replace(use, encodes=False, weights=None, streams=streams)
        encodes = 0.0 if streams else encoder_needs(memory, use).total
        return CONTEXT_GIB + max(encodes, rollout_needs(memory, alone).total + judges)

    return [CardShare(EVALUATOR, gib(streams=False), streamed_gib=gib(streams=True))]
