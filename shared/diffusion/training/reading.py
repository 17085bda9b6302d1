"""From what is stored of a group to what the recipe's algorithm trains on."""

from shared.devices.protocols import GroupData
from shared.diffusion.training.forward_process import read_finished
from shared.diffusion.training.group import TrainingGroup, read_paths
from shared.learning.algorithms import ALGORITHMS
from shared.recipe.recipe import Recipe


def read_group(recipe: Recipe, data: GroupData) -> TrainingGroup:
    """Raises ContractError if the fragments do not make up a group of this run."""
    if ALGORITHMS[recipe.algorithm.name].objective == "nft":
        return read_finished(recipe, data)
    return read_paths(recipe, data)
