"""All the names by which LoRA files call the layers of a model's network."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from shared.models.catalogue import check_family
from shared.models.families import EXPERTS
from shared.models.memory import layer_shapes
from shared.models.native_layers import NativeLayers

HIGH, LOW = EXPERTS.values()
DOTTED = (
    "base_model.model.transformer.", "base_model.model.", f"{LOW}.", f"{HIGH}.",
    "diffusion_model.", "",
)  # fmt: skip
"""How names begin that are written with dots."""
UNDERSCORED_PREFIXES = ("lora_unet_", "lora_transformer_", "lycoris_")
"""How names begin that are written with underscores in place of dots."""


def converted_name(name: str) -> str:
    """Return a name that not only DiffSynth reads, and that needs no separate file of peft."""
    name = re.sub(r"^base_model\.model\.(transformer\.)?", f"{HIGH}.", name)
    return re.sub(r"^pipe\.dit\.", "diffusion_model.", re.sub(r"^pipe\.dit2\.", f"{LOW}.", name))


@dataclass(frozen=True, slots=True)
class NamedLayers:
    """Knows the layers of one or two networks by all their names."""

    pipeline: str
    networks: Sequence[str]
    shapes: Mapping[str, tuple[int, int]]
    """(outputs, inputs) of each layer, by its name in this project."""
    native: Mapping[str, Mapping[str, tuple[str, ...]]]
    """Maps each network to its names with dots, and each name to layers by their names in it."""
    flat: Mapping[str, Mapping[str, tuple[str, ...]]]
    """Maps each network to its names with underscores in the same way."""

    @classmethod
    def from_folder(cls, folder: Path, networks: Sequence[str]) -> "NamedLayers":
        family, shapes = check_family(folder), layer_shapes(folder)
        native = {
            network: native_names(
                [each.removeprefix(prefix) for each in shapes if each.startswith(prefix)],
                family.native_layers,
            )
            for network, prefix in ((each, network_prefix(each, networks)) for each in networks)
        }
        flat = {
            network: {name.replace(".", "_"): layers for name, layers in names.items()}
            for network, names in native.items()
        }
        return cls(family.pipeline, networks, shapes, native, flat)

    def find(self, stem: str, network: str) -> tuple[str, ...] | None:
        """Returns the layers that a name stands for, by their names in this project."""
        if stem.startswith(f"{LOW}.") and LOW in self.networks:
            network = LOW
        names = self.native[network], self.flat[network]
        for beginnings, layers_by_name in zip((DOTTED, UNDERSCORED_PREFIXES), names, strict=True):
            for beginning in beginnings:
                layers = layers_by_name.get(stem.removeprefix(beginning))
                if stem.startswith(beginning) and layers is not None:
                    return tuple(network_prefix(network, self.networks) + each for each in layers)
        return None


def network_prefix(network: str, networks: Sequence[str]) -> str:
    """Returns how the names of a network's parameters begin in this project."""
    return f"{network}." if len(networks) > 1 else ""


def native_names(layers: Iterable[str], native: NativeLayers) -> dict[str, tuple[str, ...]]:
    """Return the layers of diffusers' network for each name: its own names, and the names of the
    published checkpoint."""
    own = set(layers)
    names = {}
    for pattern, parts in native.items():
        numbers = [""]
        if "{}" in pattern:
            first = re.compile(re.escape(parts[0]).replace(r"\{\}", r"(\d+)"))
            numbers = [match[1] for each in own if (match := first.fullmatch(each))]
        for number in sorted(numbers):
            part_names = tuple(part.format(number) for part in parts)
            if own.issuperset(part_names):
                names[pattern.format(number)] = part_names
    return {**names, **{layer: (layer,) for layer in own}}
