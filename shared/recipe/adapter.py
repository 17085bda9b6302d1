"""Applies a recipe's `model.adapter` to `model.lora`."""

from shared.errors import UserError
from shared.models.lora_files import LoraFile, read_lora
from shared.models.memory import layer_shapes
from shared.recipe.tables import Lora, Tables

REMEDY = "leave it out: what is trained is the adapter"


def recipe_adapter(recipe: Tables) -> LoraFile | None:
    """Return what the recipe's adapter is; None if it has none, or if the adapter or the model's
    weights are not on this host.

    Raises:
        UserError: if the adapter is not one of the model's.
    """
    model = recipe.model
    if model.adapter is None or not model.adapter.exists() or not model.folder.is_dir():
        return None
    return read_lora(model.adapter, model.folder) if layer_shapes(model.folder) else None


def check_adapter_here(recipe: Tables) -> None:
    """Raises UserError, with the remedy, if the recipe's adapter is not on this host."""
    adapter = recipe.model.adapter
    if adapter is not None and not adapter.exists():
        raise UserError(
            f"model.adapter: {adapter} does not exist; name a LoRA's safetensors file or its folder"
        )


def agreed(lora: Lora, adapter: LoraFile) -> Lora:
    """Return the table with rank, alpha, targets and experts of the adapter.

    Raises:
        UserError: if the recipe has set a conflicting value.
    """
    own = {
        "rank": adapter.rank,
        "alpha": adapter.alpha,
        "targets": adapter.targets,
        "experts": adapter.experts,
    }
    for key in sorted(lora.model_fields_set & own.keys()):
        own_value = getattr(lora, key)
        same = _covers(own_value, adapter) if key == "targets" else own_value == own[key]
        if not same:
            value = ", ".join(own["targets"]) if key == "targets" else own[key]  # type: ignore[arg-type]
            raise UserError(
                f"model.lora.{key}: {own_value!r} differs from model.adapter's {value}; {REMEDY}"
            )
    return Lora.model_validate(own)


def _covers(targets: tuple[str, ...], adapter: LoraFile) -> bool:
    """Whether these suffixes select the adapter's layers, each at least one."""
    if not targets or targets == adapter.targets:
        return True

    def named(layer: str) -> set[str]:
        return {each for each in targets if layer == each or layer.endswith(f".{each}")}

    names = [named(layer) for layer in adapter.layers]
    return all(names) and set().union(*names) == set(targets)
