"""What a run takes on the disk of the object store."""

from shared.models.memory import ITEM_BYTES, adapter_bytes, num_weights
from shared.recipe.recipe import Recipe
from shared.run.retention import stored_bytes

ADAPTED = (
    "to_q", "to_k", "to_v", "to_out.0", "to_add_out", "add_q_proj", "add_k_proj", "add_v_proj",
    "img_mlp.net.0.proj", "img_mlp.net.2", "txt_mlp.net.0.proj", "txt_mlp.net.2",
)  # fmt: skip
"""Modules that one of the families, or several, adapt where a recipe names none."""


def versions_bytes(recipe: Recipe) -> int:
    """Of weights and checkpoints, as many of them as are kept at once; trajectories and media of
    the last batches come on top.

    Raises:
        UserError: if the model's folder is none.
    """
    folder, lora = recipe.model.folder, recipe.model.lora
    if recipe.model.trained == "full":
        trained = num_weights(folder, "transformer") * ITEM_BYTES["float32"]
    else:
        trained = adapter_bytes(folder, lora.rank, lora.targets or ADAPTED)
    return stored_bytes(recipe, trained)
