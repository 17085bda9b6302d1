"""Judges what a world has come to: by its commit records alone, from what each batch must lead
to."""

from collections.abc import Sequence

from shared.run.commits import CommitRecord
from shared.store import ObjectStore
from tests.storm.judge import Rules, judge, judge_conditions, judge_objects
from tests.storm.reference import Reference
from tests.world.services import Site


async def violations(
    site: Site, records: Sequence[CommitRecord], store: ObjectStore, *, may_be_false: bool = False
) -> list[str]:
    """Return every rule that the run has broken, as sentences.

    Args:
        may_be_false: whether an intruder has chosen samples, scores or conditions: digests and
            rewards are not compared then.
    """
    recipe = site.recipe
    if not records:
        return ["no version was made"]
    found = judge(records, Rules.of(recipe))
    if not found:
        reference = Reference(site.emulation, recipe)
        found += [] if may_be_false else reference.compare(records, site.flawed)
        kept = max(recipe.run.keep_last, 1 + recipe.schedule.staleness_limit)
        found += await judge_objects(records, store, kept=kept)
    is_trained = len(records) > 1  # the first version is made before all samples
    if is_trained and site.emulation.setting.encoders and not may_be_false:
        found += await judge_conditions(store, recipe.run.name)
    return found
