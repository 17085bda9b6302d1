"""Shows the result of a trace."""

from collections.abc import Iterator

from digenrl.trace.record import GIB, Flops, Trace, Training
from shared.recipe.recipe import Recipe

GB = 1e9
TERA = 1e12


def lines(model_trace: Trace, recipe: Recipe) -> Iterator[str]:
    """Yields a table of a trace, a row each of what is held, peaks, arithmetic and storage."""
    weights, training = model_trace.weights, model_trace.training
    sizes = {
        "network": weights.network - weights.saved,
        "adapter" if model_trace.shape.trained == "lora" else "": weights.trained,
        "text encoders": sum(weights.text.values()),
        "decoder": weights.decoder,
        "optimizer": training.optimizer,
    }
    if model_trace.sharded:
        sizes[f"network on one of {model_trace.sharded.ranks} ranks"] = model_trace.sharded.network
    yield _row("held, GiB", {name: f"{size / GIB:.2f}" for name, size in sizes.items() if name})
    yield _row("beyond it, GiB", _peaks(model_trace, training))
    yield _row("TFLOP", _arithmetic(model_trace, training))
    yield _row("launches", _launches(model_trace, training))
    yield _row("stored, GB", _storage(model_trace, recipe))


def _peaks(model_trace: Trace, training: Training) -> dict[str, str]:
    peaks = {
        **{f"denoising {_several(e.rows, 'sample')}": e.peak_bytes for e in model_trace.denoise},
        f"decoding {_several(model_trace.decode.rows, 'sample')}": model_trace.decode.peak_bytes,
        **{f"training {_several(e.rows, 'row')}": e.peak_bytes for e in training.passes},
    }
    return {name: f"{size / GIB:.2f}" for name, size in peaks.items()}


def _arithmetic(model_trace: Trace, training: Training) -> dict[str, str]:
    last = training.passes[-1]
    figures = {
        "step": _tera(model_trace.denoise[-1].flops, model_trace.denoise[-1].rows),
        "decoding": _tera(model_trace.decode.flops, model_trace.decode.rows),
        "row forward": _tera(last.forward, last.rows),
        "backward": _tera(last.backward, last.rows),
        "KL": _tera(last.kl, last.rows),
        "row over step": f"{model_trace.rho:.2f}",
    }
    return {name: value for name, value in figures.items() if value}


def _launches(model_trace: Trace, training: Training) -> dict[str, str]:
    numbers = {
        "step": model_trace.denoise[-1].launches,
        "training pass": training.passes[-1].launches,
        "decoding": model_trace.decode.launches,
    }
    return {name: f"{number:,}" for name, number in numbers.items()}


def _storage(model_trace: Trace, recipe: Recipe) -> dict[str, str]:
    stored, batch = model_trace.stored, recipe.batch
    samples = batch.groups * batch.group_size
    each = stored.batch(batch.groups, batch.group_size)
    sizes = {
        "trajectories": samples * stored.trajectory,
        "media": samples * stored.media,
        "conditions": batch.groups * stored.conditions,
        "weights and optimizer": stored.weights + stored.checkpoint,
        "per batch": each,
        "per run": each * recipe.run.steps,
    }
    return {name: f"{size / GB:.2f}" for name, size in sizes.items()}


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
