"""Runs the family, whose network is FLUX's and whose pipeline is no class of diffusers."""

from typing import Any

from shared.diffusion.families.flux import Flux


class Orchid(Flux):
    @classmethod
    def class_named(cls, name: str) -> Any:
        from diffusers import FluxPipeline

        class OrchidPipeline(FluxPipeline):  # type: ignore[misc]
            pass

        return OrchidPipeline if name == "OrchidPipeline" else super().class_named(name)
