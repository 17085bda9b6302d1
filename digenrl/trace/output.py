"""Shows the result of a trace."""

from collections.abc import Iterator

from digenrl.trace.record import GIB, Flops, Trace, Training
from shared.recipe.recipe import Recipe

GB = 1e9
TERA = 1e12


def lines(found: Trace, recipe: Recipe) -> Iterator[str]:
    """Yields a table of a trace, a row each of what is held, peaks, arithmetic and storage."""
    weights, training = found.weights, found.training
    held = {
        "network": weights.network - weights.saved,
        "adapter" if found.shape.trained == "lora" else "": weights.trained,
        "text encoders": sum(weights.text.values()),
        "decoder": weights.decoder,
        "optimizer": training.optimizer,
    }
    if found.sharded:
        held[f"network on one of {found.sharded.ranks} ranks"] = found.sharded.network
    yield _row("held, GiB", {name: f"{size / GIB:.2f}" for name, size in held.items() if name})
    yield _row("beyond it, GiB", _peaks(found, training))
    yield _row("TFLOP", _arithmetic(found, training))
    yield _row("launches", _launches(found, training))
    yield _row("stored, GB", _storage(found, recipe))


def _peaks(found: Trace, training: Training) -> dict[str, str]:
    peaks = {
        **{f"denoising {_several(e.rows, 'sample')}": e.peak_bytes for e in found.denoise},
        f"decoding {_several(found.decode.rows, 'sample')}": found.decode.peak_bytes,
        **{f"training {_several(e.rows, 'row')}": e.peak_bytes for e in training.passes},
    }
    return {name: f"{size / GIB:.2f}" for name, size in peaks.items()}


def _arithmetic(found: Trace, training: Training) -> dict[str, str]:
    last = training.passes[-1]
    told = {
        "step": _tera(found.denoise[-1].flops, found.denoise[-1].rows),
        "decoding": _tera(found.decode.flops, found.decode.rows),
        "row forward": _tera(last.forward, last.rows),
        "backward": _tera(last.backward, last.rows),
        "KL": _tera(last.kl, last.rows),
        "row over step": f"{found.rho:.2f}",
    }
    return {name: value for name, value in told.items() if value}


def _launches(found: Trace, training: Training) -> dict[str, str]:
    numbers = {
        "step": found.denoise[-1].launches,
        "training pass": training.passes[-1].launches,
        "decoding": found.decode.launches,
    }
    return {name: f"{number:,}" for name, number in numbers.items()}


def _storage(found: Trace, recipe: Recipe) -> dict[str, str]:
    stored, batch = found.stored, recipe.batch
    samples = batch.groups * batch.group_size
    each = stored.batch(batch.groups, batch.group_size)
    told = {
        "trajectories": samples * stored.trajectory,
        "media": samples * stored.media,
        "conditions": batch.groups * stored.conditions,
        "weights and optimizer": stored.weights + stored.checkpoint,
        "per batch": each,
        "per run": each * recipe.run.steps,
    }
    return {name: f"{size / GB:.2f}" for name, size in told.items()}


def _tera(flops: Flops, rows: int) -> str:
    """Show operations per row, with float32 separate where another type has the most."""
    if not flops:
        return ""
    total, apart = sum(flops.values()) / rows / TERA, flops.get("float32", 0) / rows / TERA
    return f"{total:.3g}" + (f" ({apart:.2g} in float32)" if 0 < apart < total else "")


def _several(count: int, what: str) -> str:
    return f"{count} {what}" + ("s" if count > 1 else "")


def _row(name: str, values: dict[str, str]) -> str:
    return f"{name:<16}" + ", ".join(f"{key} {value}" for key, value in values.items())
