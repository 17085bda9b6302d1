"""Measurements as tables for people; the profile is for programs."""

from rich.console import Console
from rich.table import Column, Table

from digenrl.trace.device_profile.device_costs import row_seconds
from digenrl.trace.device_profile.fit import fit
from digenrl.trace.device_profile.ladder import Ladder
from digenrl.trace.device_profile.measure import DeviceMeasurement
from services.scheduler.costs.profile import ProfileFile
from services.scheduler.costs.seconds import generation_work, training_work


def show(
    base: ProfileFile, profile: ProfileFile, measured: DeviceMeasurement, console: Console
) -> None:
    """Print seconds and memory by size, then the profile next to the earlier one."""
    console.print(_ladder("denoising", "samples", measured.generation))
    console.print(_ladder("training", "rows", measured.training))
    console.print(_details(base, measured))
    console.print(_comparison(base, profile))


def _ladder(title: str, unit: str, ladder: Ladder) -> Table:
    table = _table(title, f"{unit} per call", "seconds", f"ms per {unit[:-1]}", "peak GiB")
    for rung in ladder.rungs:
        table.add_row(
            str(rung.rows), f"{rung.seconds:.4g}", f"{rung.per_row * 1e3:.4g}",
            f"{rung.peak_bytes / 2**30:.1f}",
        )  # fmt: skip
    if ladder.out_of_memory is not None:
        table.add_row(str(ladder.out_of_memory), "does not fit", "", "")
    return table


def _details(base: ProfileFile, measured: DeviceMeasurement) -> Table:
    table = _table("on this device", "", "")
    table.show_header = False
    for name, value in {**_ratios(base, measured), **_switch(measured)}.items():
        table.add_row(name, value)
    way = measured.publication
    table.add_row("adapter, MB", f"{way.num_bytes / 1e6:.4g}")
    table.add_row("copy, digest, s", f"{way.copy_seconds:.3g}, {way.digest_seconds:.3g}")
    table.add_row("store, stage, s", f"{way.store_seconds:.3g}, {way.stage_seconds:.3g}")
    table.add_row("adoption pause, ms", f"{way.pause_seconds * 1e3:.3g}")
    return table


def _ratios(base: ProfileFile, measured: DeviceMeasurement) -> dict[str, str]:
    ladders = {"a step of n, ms": measured.generation, "a pass of n, ms": measured.training}
    ratios = {name: _fitted(ladder) for name, ladder in ladders.items() if ladder.rungs}
    forward, row = row_seconds(base, measured)
    if forward is not None and row is not None:
        ratios["rho, a trained row over a sample's step"] = f"{row / forward:.3g}"
    return ratios


def _fitted(ladder: Ladder) -> str:
    """Describe the cost of a call by its size, and up to which size the host sets the pace."""
    model = fit(ladder.rungs)
    device = f"{model.call * 1e3:.4g} + {model.row * 1e3:.4g} n" if model.row else ""
    host = f"{model.host * 1e3:.4g} (the host, up to {model.host_bound(ladder.rungs)})"
    return ", or ".join(filter(None, (host if model.host else "", device)))


def _switch(measured: DeviceMeasurement) -> dict[str, str]:
    switch = measured.switch
    if switch is None:
        return {"switch": "not measured: both do not fit"}
    return {
        "switch to generation, ms": f"{switch.to_generation_seconds * 1e3:.3g}",
        "switch to training, ms": f"{switch.to_training_seconds * 1e3:.3g}",
        "gradient unchanged by it": "yes" if switch.gradient_unchanged else "NO",
    }


def _comparison(base: ProfileFile, profile: ProfileFile) -> Table:
    table = _table("profile, H100 seconds", "", base.name, profile.name)
    before, after = _rows(base), _rows(profile)
    for name, value in before.items():
        table.add_row(name, value, after[name])
    return table


def _rows(costs: ProfileFile) -> dict[str, str]:
    profile = costs.trained(costs.variants["lora"])
    rollout, variant = profile.rollout, profile.variant
    ratio = generation_work(profile) / training_work(profile)
    values = {
        "rho": variant.rho,
        "call (o), s": rollout.call_seconds,
        "sample (c), s": rollout.sample_seconds,
        "denoising step per sample, s": profile.forward_seconds,
        "switch, s": variant.switch_seconds,
        "optimizer, s": variant.optimizer_seconds,
        "published, GB": variant.published_gb,
        "publish, s": variant.publish_seconds,
        "adopt, s": variant.adopt_seconds,
        "rollout memory, GiB": rollout.memory_gib,
        "training memory, GiB": variant.memory_gib,
    }
    return {
        "generation : training": f"{ratio:.2f} : 1",
        **{name: f"{value:.4g}" for name, value in values.items()},
    }


def _table(title: str, *columns: str) -> Table:
    named = (Column(name, no_wrap=True) for name in columns)
    return Table(*named, title=title, box=None, pad_edge=False, title_justify="left")
