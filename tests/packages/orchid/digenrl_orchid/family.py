"""What is known of the family without torch."""

from dataclasses import replace

from digenrl.plugins import FAMILIES

ORCHID = replace(
    FAMILIES["FluxPipeline"], pipeline="OrchidPipeline", adapter="digenrl_orchid.adapter:Orchid"
)
