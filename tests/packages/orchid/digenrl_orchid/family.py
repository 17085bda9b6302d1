"""What is known of the family without torch."""

from dataclasses import replace

from shared.models.families import FAMILIES

ORCHID = replace(
    FAMILIES["FluxPipeline"], pipeline="OrchidPipeline", adapter="digenrl_orchid.adapter:Orchid"
)
