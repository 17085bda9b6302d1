"""The weights that a run is left with: its newest version's, or their moving average."""

from services.trainer.engine.checkpoint import averaged
from shared.diffusion.tensors import pack, unpack
from shared.recipe.recipe import Recipe
from shared.run.commits import CommitRecord
from shared.store import ObjectStore


async def weights_to_use(store: ObjectStore, recipe: Recipe, record: CommitRecord) -> bytes:
    """Of one version."""
    if recipe.trainer.ema is None:
        return await store.get(record.weights)
    return pack(averaged(unpack(await store.get(record.checkpoint))))
