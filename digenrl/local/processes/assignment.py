"""Assigns the GPUs of this machine to the processes of a local run, by the ledger of the host."""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from digenrl.local.processes.gpus import VISIBLE
from digenrl.planning.entries import (
    EVALUATOR,
    encoder_names,
    make_ledger,
    make_shares,
    reward_names,
    rollout_names,
    trainer_names,
)
from digenrl.planning.ledger import Card, Ledger, ProcessPlacement
from digenrl.planning.plan import with_weights
from services.scheduler.costs.profile import Profile
from services.scheduler.costs.recipes import recipe_costs
from shared.errors import UserError
from shared.recipe.recipe import Recipe

REPORT = "report"
MEMORY, STREAMED = "DIGENRL_MEMORY_GIB", {"DIGENRL_ROLLOUT_MEMORY": "streamed"}

Environments = Mapping[str, Mapping[str, str]]
"""Name of a process -> its variables, in addition to the inherited ones."""


@dataclass(frozen=True, slots=True)
class Assignment:
    environments: Environments
    warnings: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    """Which processes share a GPU."""
    evaluates_at_end: bool = False
    """Whether no GPU has room for the evaluator, which starts when the others have ended."""


def assign_gpus(recipe: Recipe, cards: Sequence[Card]) -> Assignment:
    """Assign cards to the processes of a run.

    Raises:
        UserError: if there are too few of them to train and to generate.
    """
    names = (
        *trainer_names(recipe),
        *rollout_names(recipe),
        *reward_names(recipe),
        *encoder_names(recipe),
    )
    if recipe.model.device == "cpu":
        return Assignment({name: {VISIBLE: ""} for name in (*names, EVALUATOR, REPORT)})
    ledger = make_ledger(recipe, cards, _costs(recipe))
    if ledger is None:
        raise _too_few(recipe, cards)
    evaluator = ledger.places.get(EVALUATOR, ProcessPlacement())
    last = {EVALUATOR: evaluator if evaluator.cards else ProcessPlacement(tuple(cards[:1]))}
    last[REPORT] = ProcessPlacement(tuple(cards[:1]))
    return Assignment(
        {
            name: _environment(
                name, {**ledger.places, **last}.get(name, ProcessPlacement()), ledger
            )
            for name in (*names, EVALUATOR, REPORT)
        },
        warnings=tuple(_warnings(recipe, ledger)),
        notes=tuple(_notes(recipe, ledger)),
        evaluates_at_end=not evaluator.cards,
    )


def _costs(recipe: Recipe) -> Profile | None:
    with contextlib.suppress(UserError):  # of a model that has no profile
        return with_weights(recipe_costs(recipe), recipe.model.folder)
    return None


def _environment(name: str, place: ProcessPlacement, ledger: Ledger) -> dict[str, str]:
    """Return a process's variables; one with a policy leaves memory to others on its card."""
    found = {VISIBLE: ",".join(card.name for card in place.cards)}
    if place.streams:
        found |= STREAMED
    left = ledger.left_gib(name) if name.startswith(("trainer-", "rollout-")) else None
    return found if left is None else {**found, MEMORY: f"{left:.2f}"}


def _takers(recipe: Recipe) -> dict[str, tuple[list[str], str]]:
    """Return the processes that share cards: by the key of their number, names and what they do."""
    return {
        "reward.workers": (reward_names(recipe), "the networks of the rewards"),
        "encoder.workers": (encoder_names(recipe), "the encoders"),
        "evaluation.every": ([EVALUATOR], "the evaluator"),
    }


def _warnings(recipe: Recipe, ledger: Ledger) -> Iterator[str]:
    parts = {part.process for part in make_shares(recipe, None)}
    for key, (names, what) in _takers(recipe).items():
        left = [name for name in names if name in parts and not ledger.places[name].cards]
        if left:
            how = "it starts after the run" if key == "evaluation.every" else "they run on the CPU"
            yield f"{key}: no GPU has room for {what}; {how}"


def _notes(recipe: Recipe, ledger: Ledger) -> Iterator[str]:
    for names, what in _takers(recipe).values():
        places = [ledger.places.get(name, ProcessPlacement()) for name in names]
        shared = [card.name for place in places if place.policies_on_card for card in place.cards]
        policies = sorted({policy for place in places for policy in place.policies_on_card})
        if shared:
            streams = ", and streams the network" if any(each.streams for each in places) else ""
            yield f"{what}: on GPU {', '.join(shared)} beside {', '.join(policies)}{streams}"


def _too_few(recipe: Recipe, cards: Sequence[Card]) -> UserError:
    trained, generating = recipe.trainer.devices, recipe.rollout.workers
    trains = "train and generate" if recipe.schedule.members_generate else "train"
    generates = f", {generating} to generate" * bool(generating)
    return UserError(
        f"trainer.devices, rollout.workers: {trained + generating} GPUs needed "
        f"({trained} to {trains}{generates}), {len(cards) or 'none'} found; "
        f'lower these keys, name the GPUs in {VISIBLE}, or set model.device = "cpu"'
    )
