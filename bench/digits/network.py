"""How large the generator is."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """The transformer's size; as it stands, the demo's."""

    layers: int = 3
    heads: int = 4
    head_width: int = 16
    patch: int = 2
    """Pixels per token and side."""
