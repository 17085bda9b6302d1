"""Settles what `schedule.max_staleness = "auto"` is for a run, once: a resumed run keeps it."""

import structlog
from pydantic import ValidationError

from services.scheduler.sim.staleness import StalenessDecision, decide_at_start
from shared.errors import ContractError
from shared.recipe.recipe import Recipe, override
from shared.run.layout import staleness_key
from shared.run.run_recipe import read_recipe
from shared.store import ObjectStore

log = structlog.get_logger()


async def settle_staleness(store: ObjectStore, recipe: Recipe) -> tuple[Recipe, StalenessDecision]:
    """Return the recipe with a number in place of "auto", and why it is that one.

    The decision is stored with the run; one that is stored already is taken as it is.
    """
    setting = recipe.schedule.max_staleness
    if setting != "auto":
        decision = StalenessDecision(max_staleness=setting, gain=None, reason="the recipe says so")
        return recipe, decision
    decision = await _stored(store, recipe.run.name) or await _first(store, recipe)
    log.info(
        "staleness_decided",
        max_staleness=decision.max_staleness,
        gain=decision.gain,
        reason=decision.reason,
    )
    return override(recipe, {"schedule.max_staleness": decision.max_staleness}), decision


async def _first(store: ObjectStore, recipe: Recipe) -> StalenessDecision:
    """Decide, and store the decision; a run that began without a stored decision continues as it
    is."""
    begun = await read_recipe(store, recipe.run.name)
    if begun is None:
        decision = decide_at_start(recipe)
    else:
        decision = StalenessDecision(
            max_staleness=begun.schedule.staleness_limit,
            gain=None,
            reason="the run has begun with it",
        )
    data = decision.model_dump_json(indent=1).encode()
    await store.create(staleness_key(recipe.run.name), data)
    return await _stored(store, recipe.run.name) or decision


async def _stored(store: ObjectStore, run: str) -> StalenessDecision | None:
    data = await store.read(staleness_key(run))
    try:
        return None if data is None else StalenessDecision.model_validate_json(data)
    except ValidationError as error:
        raise ContractError(f"{staleness_key(run)} is not a decision of this release") from error
