"""The tracer is right: on the recipes of commit 30368cb, at that commit's shapes, it gives the
figures of the audit that traced them with a program of its own."""

from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import pytest
import torch

from digenrl.trace.record import GIB, Trace
from digenrl.trace.runs import TraceSetting, trace
from shared.devices.chunks import Chunk
from shared.models.published import find_configuration
from shared.recipe.recipe import Recipe, load_recipe, with_folder

RECIPES = Path(__file__).parent / "recipes"
TERA, MEGA = 1e12, 1e6
ROWS = 4
WITHIN = 0.05


@dataclass(frozen=True, kw_only=True)
class Audit:
    """Holds the audit's figures of one recipe, in GiB, TFLOP and MB."""

    resident: float
    """Network, adapter, text encoders and decoder, in bfloat16 but for the adapter."""
    step: float
    """Peak of a denoising step of one sample."""
    decode: float
    four_rows: float
    """Peak of a training pass of four rows, with the gradients that it makes."""
    step_tflop: float
    row_tflop: float
    rho: float
    trajectory: float
    text_tokens: int
    step_since: float | None = None
    """Peak of a step since an adapter's part is added in place, where that made it less."""


AUDIT = {
    "flux1-dev": Audit(
        resident=31.8, step=0.15, decode=0.375, four_rows=3.2,
        step_tflop=21.73, row_tflop=67.8, rho=3.12, trajectory=1.05, text_tokens=512,
    ),
    "sd35-medium": Audit(
        resident=15.6, step=0.10, decode=0.375, four_rows=1.5,
        step_tflop=4.45, row_tflop=18.8, rho=4.18, trajectory=2.6, text_tokens=128,
    ),
    "qwen-image": Audit(
        resident=55.3, step=0.35, decode=0.846, four_rows=5.3,
        step_tflop=32.32, row_tflop=100, rho=3.10, trajectory=0.79, text_tokens=64,
        step_since=0.236,
    ),
    "wan2.1-14b": Audit(
        resident=37.9, step=0.91, decode=1.0, four_rows=22.6,
        step_tflop=196.2, row_tflop=815, rho=4.15, trajectory=9.9, text_tokens=512,
        step_since=0.798,
    ),
    "hunyuanvideo": Audit(
        resident=39.0, step=1.32, decode=8.52, four_rows=27.8,
        step_tflop=299, row_tflop=1080, rho=3.62, trajectory=32.3, text_tokens=256,
    ),
}  # fmt: skip
FIRST_FRAGMENTS = {"hunyuanvideo": 107, "hunyuanvideo.1-gpu": 108}
"""What the first fragment took in all, decoded at once; the second one's device trains as well."""
FRAGMENT = 8
"""Samples of those fragments at that commit."""


def recipe_of(name: str) -> Recipe:
    recipe = load_recipe(RECIPES / f"{name}.toml")
    return with_folder(recipe, find_configuration(recipe.model.folder).folder)


@cache
def traced(name: str, fragment: int, decoded: int) -> Trace:
    setting = TraceSetting(
        fragment=fragment,
        chunks=(Chunk(ROWS, 1),),
        decoded=decoded,
        decodes_in=torch.bfloat16,
        tokens=AUDIT[name.removesuffix(".1-gpu")].text_tokens,
        keeps_gradients=False,
    )
    return trace(recipe_of(name), setting, is_published=True, say=lambda _: None)


def resident(found: Trace) -> int:
    weights = found.weights
    return weights.network + weights.trained + sum(weights.text.values()) + weights.decoder


def check(name: str) -> None:
    found, theirs = traced(name, 1, 1), AUDIT[name]
    ours = {
        "resident": resident(found) / GIB,
        "step": found.denoise[-1].peak_bytes / GIB,
        "decode": found.decode.peak_bytes / GIB,
        "four_rows": found.training.passes[-1].peak_bytes / GIB,
        "step_tflop": found.step_flops / TERA,
        "row_tflop": found.row_flops / TERA,
        "rho": found.rho,
        "trajectory": found.stored.trajectory / MEGA,
    }
    wanted = replace(theirs, step=theirs.step_since or theirs.step)
    digits = {"step": 0.01, "four_rows": 0.05, "trajectory": 0.05}  # as the audit rounds
    off = {
        key: (value, getattr(wanted, key))
        for key, value in ours.items()
        if value != pytest.approx(getattr(wanted, key), rel=WITHIN, abs=digits.get(key, 0.0))
    }
    assert not off


@pytest.mark.slow
def test_the_cheapest_model_is_traced_as_the_audit_did() -> None:
    check("sd35-medium")


@pytest.mark.night
@pytest.mark.parametrize("name", [name for name in AUDIT if name != "sd35-medium"])
def test_every_model_is_traced_as_the_audit_did(name: str) -> None:
    check(name)


@pytest.mark.night
@pytest.mark.parametrize("name", FIRST_FRAGMENTS)
def test_the_first_fragments_of_hunyuanvideo_take_more_than_a_card_has(name: str) -> None:
    found = traced(name, FRAGMENT, FRAGMENT)
    total = resident(found) + found.decode.peak_bytes
    if name.endswith(".1-gpu"):
        total += found.training.optimizer
    assert total / GIB == pytest.approx(FIRST_FRAGMENTS[name], rel=WITHIN)
