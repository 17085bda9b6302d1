"""Counts what a network computes, by the size of its samples: the table `work` of a cost profile.

The network of a trace makes a forward pass of one row at six sizes. Costs that are the same for
every row, costs per token, and per pair of tokens, follow exactly
(`services.scheduler.costs.sizes`).
"""

from fractions import Fraction

import torch

from digenrl.trace.fakes import CPU, Unencoded
from digenrl.trace.record import MeasuredPass, TracedWork
from digenrl.trace.runs import FakeRun, TraceSetting, measured_pass
from services.scheduler.costs.sizes import NetworkWork, SampleSize, num_tokens
from shared.diffusion.generation import Generator
from shared.errors import UserError
from shared.models.catalogue import PartConfig, check_family
from shared.models.family import FamilySpec
from shared.recipe.recipe import Recipe

ROWS = 8
COLUMNS = (8, 16, 24)
"""Sizes of the samples that are counted, in tokens; networks that know no such sizes have less."""
TEXTS = (128, 256, 384)
"""Lengths of their prompts: there are networks that pad to multiples of 32 or of 128."""
POINTS = ((0, 0), (1, 0), (2, 0), (0, 1), (0, 2), (1, 1))
"""Columns and lengths of what is counted, by their places above: as many as there are terms."""
PROBE = 0.5
"""Sigma of the pass, which its operations do not depend on."""


def count_work(recipe: Recipe, setting: TraceSetting) -> TracedWork:
    """Counts what a cost profile needs besides a trace of the recipe.

    Raises:
        UserError: if files are missing, or the model's family is unknown.
    """
    run = FakeRun.from_recipe(recipe, setting)
    work = _work(recipe, run)
    whole = _decoding(_with_tiles(recipe, False), setting)
    try:
        tiled = _decoding(_with_tiles(recipe, True), setting)
    except UserError:  # its decoder has no tiles
        tiled = whole
    return TracedWork(work=work, whole=whole, tiled=tiled)


def _with_tiles(recipe: Recipe, tiles: bool) -> Recipe:
    model = recipe.model.model_copy(update={"vae_tiling": tiles})
    return recipe.model_copy(update={"model": model})


def _decoding(recipe: Recipe, setting: TraceSetting) -> MeasuredPass:
    """Measures the decoding of one sample."""
    run, table = FakeRun.from_recipe(recipe, setting), recipe.model
    model = run.model.policy.model
    generator = Generator(recipe, run.model.policy)
    with run.running() as meter:
        size = {"height": table.height, "width": table.width, "frames": table.frames}
        latents = torch.zeros(1, *model.latent_shape(**size), device=CPU)
        with meter.section(meter.live) as section:
            generator.decoded(latents)
    return measured_pass(1, section)


def _work(recipe: Recipe, run: FakeRun) -> NetworkWork:
    """Counts the forward pass of one row, with the adapter. A prompt counts at its longest: no row
    computes more, and where prompts are not padded, fewer."""
    table, model = recipe.model, run.model
    spec = check_family(table.folder)
    network = PartConfig(table.folder / "transformer" / "config.json")
    decoder = PartConfig(table.folder / "vae" / "config.json")
    side = spec.pixels_per_token(network, decoder)
    per_latent = 1 if spec.frame_factor is None else spec.frame_factor(decoder)
    work = NetworkWork(
        height=table.height, width=table.width, frames=table.frames,
        text_tokens=model.tokens, clip_tokens=0, pads_text=True,
        pixels_per_token=side, frames_per_latent=per_latent,
        token_gflop=1.0, text_token_gflop=0.0, pair_flop=1.0, cross_flop=0.0, text_pair_flop=0.0,
    )  # fmt: skip
    most = spec.max_tokens_per_side(network) or max(COLUMNS)
    columns = COLUMNS if most >= max(COLUMNS) else (most // 3, most // 2, most)
    counted = []
    with run.running() as meter:
        for column, text in POINTS:
            size = SampleSize(
                height=min(ROWS, most) * side, width=columns[column] * side, frames=table.frames,
                text_tokens=TEXTS[text],
            )  # fmt: skip
            with meter.section(meter.live) as section:
                _forward(recipe, run, spec, size)
            flops = sum(section.flops("without_gradient").values())
            counted.append((num_tokens(work, size), size.text_tokens, flops))
    every, token, text_token, pair, cross, text_pair = _terms(counted)
    return work.model_copy(
        update={
            "token_gflop": float(token) / 1e9,
            "text_token_gflop": max(0.0, float(text_token) / 1e9),
            "row_gflop": max(0.0, float(every) / 1e9),
            "pair_flop": float(pair),
            "cross_flop": max(0.0, float(cross)),
            "text_pair_flop": max(0.0, float(text_pair)),
        }
    )


@torch.no_grad()
def _forward(recipe: Recipe, run: FakeRun, spec: FamilySpec, size: SampleSize) -> None:
    """Runs the network once, for one sample of that size."""
    model = run.model.policy.model
    assert isinstance(model, Unencoded)
    given = {"height": size.height, "width": size.width, "frames": size.frames}
    model.velocity(
        torch.zeros(1, *model.latent_shape(**given), device=CPU),
        torch.full((1,), PROBE),
        model.zeros(size.text_tokens, given),
        guidance=recipe.model.guidance if spec.forwards(recipe.model.guidance) == 1 else 1.0,
    )


def _terms(counted: list[tuple[int, int, int]]) -> list[Fraction]:
    """Solves for the terms 1, n, t, n^2, n t and t^2 of operations at (n, t), without rounding.

    >>> [int(each) for each in _terms([(n, t, 5 + 3 * n + n * n + 2 * n * t)
    ...     for n, t in ((1, 1), (2, 1), (3, 1), (1, 2), (1, 3), (2, 2))])]
    [5, 3, 0, 1, 2, 0]
    """
    rows = [
        [Fraction(each) for each in (1, n, t, n * n, n * t, t * t, flops)]
        for n, t, flops in counted
    ]
    for place in range(len(rows)):
        pivot = next(row for row in rows[place:] if row[place])
        rows.remove(pivot)
        pivot = [each / pivot[place] for each in pivot]
        rows = [
            [each - row[place] * mine for each, mine in zip(row, pivot, strict=True)]
            for row in rows
        ]
        rows.insert(place, pivot)
    return [row[-1] for row in rows]
