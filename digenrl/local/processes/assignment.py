"""Assigns the GPUs of this machine to the processes of a local run."""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from digenrl.local.processes.gpus import VISIBLE
from digenrl.planning.entries import EVALUATOR, Processes, make_ledger, make_shares
from digenrl.planning.ledger import Card, Ledger, ProcessPlacement
from digenrl.planning.plan import with_weights
from services.scheduler.costs.profile import Profile
from services.scheduler.costs.recipes import recipe_costs
from shared.errors import UserError
from shared.recipe.recipe import Recipe

REPORT = "report"
MEMORY, STREAMED = "DIGENRL_MEMORY_GIB", {"DIGENRL_ROLLOUT_MEMORY": "streamed"}

Environments = Mapping[str, Mapping[str, str]]
"""Environment variables of each process, by its name, in addition to the inherited variables."""


@dataclass(frozen=True, slots=True)
class Assignment:
    environments: Environments
    warnings: tuple[str, ...] = ()
    """Processes for which no GPU has enough memory, and the consequence."""
    notes: tuple[str, ...] = ()
    """Processes that share a GPU."""
    evaluates_at_end: bool = False
    """Whether the evaluator runs after the run, because no GPU has enough memory for it."""


def assign_gpus(recipe: Recipe, cards: Sequence[Card], processes: Processes) -> Assignment:
    """Assign a host's cards to its processes.

    Raises:
        UserError: if the cards are too few for the processes that train and generate.
    """
    names = (*processes.workers, EVALUATOR, REPORT)
    if recipe.model.device == "cpu":
        return Assignment({name: {VISIBLE: ""} for name in names})
    ledger = make_ledger(recipe, cards, _costs(recipe), processes)
    if ledger is None:
        raise _too_few(recipe, cards)
    evaluator = ledger.places.get(EVALUATOR, ProcessPlacement())
    first_card = ProcessPlacement(tuple(cards[:1]))
    after_run = {EVALUATOR: evaluator if evaluator.cards else first_card, REPORT: first_card}
    return Assignment(
        {
            name: _environment(
                name, {**ledger.places, **after_run}.get(name, ProcessPlacement()), ledger
            )
            for name in names
        },
        warnings=tuple(_warnings(recipe, ledger, processes)),
        notes=tuple(_notes(ledger, processes)),
        evaluates_at_end=not evaluator.cards,
    )


def _costs(recipe: Recipe) -> Profile | None:
    with contextlib.suppress(UserError):  # the model has no cost profile
        return with_weights(recipe_costs(recipe), recipe.model.folder)
    return None


def _environment(name: str, place: ProcessPlacement, ledger: Ledger) -> dict[str, str]:
    """Return a process's variables: its cards and, if it shares a card, its memory limit."""
    variables = {VISIBLE: ",".join(card.name for card in place.cards)}
    if place.streams:
        variables |= STREAMED
    limit_gib = ledger.left_gib(name) if name.startswith(("trainer-", "rollout-")) else None
    return variables if limit_gib is None else {**variables, MEMORY: f"{limit_gib:.2f}"}


def _sharing_processes(processes: Processes) -> dict[str, tuple[list[str], str]]:
    """Return names and description of processes that may share cards, by their recipe key."""
    return {
        "reward.workers": (processes.names("reward"), "the networks of the rewards"),
        "encoder.workers": (processes.names("encoder"), "the encoders"),
        "evaluation.every": ([EVALUATOR], "the evaluator"),
    }


def _warnings(recipe: Recipe, ledger: Ledger, processes: Processes) -> Iterator[str]:
    shares = {share.process for share in make_shares(recipe, None, processes)}
    for key, (names, description) in _sharing_processes(processes).items():
        if any(name in shares and not ledger.places[name].cards for name in names):
            is_evaluator = key == "evaluation.every"
            consequence = "it starts after the run" if is_evaluator else "they run on the CPU"
            yield f"{key}: no GPU has enough memory for {description}; {consequence}"


def _notes(ledger: Ledger, processes: Processes) -> Iterator[str]:
    for names, description in _sharing_processes(processes).values():
        places = [ledger.places.get(name, ProcessPlacement()) for name in names]
        shared = [card.name for place in places if place.policies_on_card for card in place.cards]
        policies = sorted({policy for place in places for policy in place.policies_on_card})
        if shared:
            streams = ", and streams the network" if any(each.streams for each in places) else ""
            yield f"{description}: on GPU {', '.join(shared)}, with {', '.join(policies)}{streams}"


def _too_few(recipe: Recipe, cards: Sequence[Card]) -> UserError:
    num_training, num_generating = recipe.trainer.devices, recipe.rollout.workers
    role = "train and generate" if recipe.schedule.members_generate else "train"
    generates = f", {num_generating} to generate" * bool(num_generating)
    return UserError(
        f"trainer.devices, rollout.workers: {num_training + num_generating} GPUs needed "
        f"({num_training} to {role}{generates}), {len(cards) or 'none'} found; "
        f'lower these keys, name the GPUs in {VISIBLE}, or set model.device = "cpu"'
    )
