"""The processes of a run on one host, as entries of its ledger."""

from collections.abc import Sequence
from dataclasses import replace

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
from shared.recipe.recipe import Recipe
from shared.recipe.rewards import ScorerTable

EVALUATOR = "evaluator"


def make_ledger(recipe: Recipe, cards: Sequence[Card], profile: Profile | None) -> Ledger | None:
    """Return where the processes of `digenrl up` run; None if cards are too few for the policies.

    Args:
        profile: costs of the recipe's model; without its table of memory nothing is shared.
    """
    memory = None if profile is None else profile.memory
    if profile is None or memory is None:
        return share_out(cards, make_policies(recipe, None), make_shares(recipe, None))
    use = model_use(recipe, profile, fragment=steady_fragment_size(recipe))
    held = memory, use
    return share_out(cards, make_policies(recipe, held), make_shares(recipe, held))


HeldMemory = tuple[Memory, ModelUse]


def trainer_names(recipe: Recipe) -> list[str]:
    """Return the names of the members: a process, or a shard group, each."""
    trainer = recipe.trainer
    return [f"trainer-{each}" for each in range(trainer.devices // trainer.shard_devices)]


def reward_names(recipe: Recipe) -> list[str]:
    return [f"reward-{number}" for number in range(recipe.reward.workers)]


def encoder_names(recipe: Recipe) -> list[str]:
    return [f"encoder-{number}" for number in range(recipe.encoder.workers)]


def rollout_names(recipe: Recipe) -> list[str]:
    return [f"rollout-{number}" for number in range(recipe.rollout.workers)]


def make_policies(recipe: Recipe, held: HeldMemory | None) -> list[Policy]:
    """Return members and rollout workers, with their share of a card if ``held`` has it."""
    ranks = recipe.trainer.shard_devices
    least, wanted = _member_gib(recipe, held)
    rollout = None if held is None else CONTEXT_GIB + rollout_needs(*held).total
    return [
        *(Policy(name, least, wanted, ranks) for name in trainer_names(recipe)),
        *(Policy(name, rollout, rollout) for name in rollout_names(recipe)),
    ]


def _member_gib(recipe: Recipe, held: HeldMemory | None) -> tuple[float, float] | tuple[None, None]:
    if held is None:
        return None, None
    memory, use = held
    needs = member_needs if recipe.run_schedule.trainer_generates else trainer_needs
    rows = min(TARGET_ROWS, recipe.trained_samples * recipe.sampling.window)
    wanted = needs(memory, replace(use, rows=max(use.rows, rows))).total
    return CONTEXT_GIB + needs(memory, use).total, CONTEXT_GIB + wanted


def make_shares(recipe: Recipe, held: HeldMemory | None) -> list[CardShare]:
    """Return the processes that may share a card, in the order in which they are placed."""
    return [*_rewards(recipe), *_encoders(recipe, held), *_evaluator(recipe, held)]


def _rewards(recipe: Recipe) -> list[CardShare]:
    table = recipe.reward
    if not any(may_load_a_network(scorer.type) for scorer in table.scorers):
        return []
    samples = recipe.batch.groups * recipe.batch.group_size
    seconds = samples * image_tflop(recipe, on_gpu=True) / GPU_TFLOPS / table.workers
    gib = _networks_gib(table.scorers)
    return [
        CardShare(name, None if gib is None else CONTEXT_GIB + WORK_GIB + gib, seconds)
        for name in reward_names(recipe)
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


def _encoders(recipe: Recipe, held: HeldMemory | None) -> list[CardShare]:
    if recipe.encoder.device is not None:
        return []
    gib = None if held is None else CONTEXT_GIB + WORK_GIB + encoder_needs(*held).total
    return [CardShare(name, gib) for name in encoder_names(recipe)]


def _evaluator(recipe: Recipe, held: HeldMemory | None) -> list[CardShare]:
    """Return the evaluator: it encodes before it loads the network, on the CPU if it streams the
    network, and then judges as well."""
    judges = _networks_gib((*recipe.reward.scorers, *recipe.evaluation.scorers))
    if recipe.evaluation.every is None:
        return []
    if held is None or judges is None:
        return [CardShare(EVALUATOR, None)]
    memory, use = held

    def gib(*, streams: bool) -> float:
        alone = replace(use, encodes=False, weights=None, streams=streams)
        encodes = 0.0 if streams else encoder_needs(memory, use).total
        return CONTEXT_GIB + max(encodes, rollout_needs(memory, alone).total + judges)

    return [CardShare(EVALUATOR, gib(streams=False), streamed_gib=gib(streams=True))]
