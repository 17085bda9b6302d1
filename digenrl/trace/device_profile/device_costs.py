"""Measurements as a cost profile: the project's own profile of that model, with measured numbers.

The seconds of a profile apply to an H100. A device in the profile is taken to have the speed there,
and measurements are converted by it; an unknown device enters with the speed at which its measured
seconds equal the profile's.
"""

import re
from dataclasses import dataclass

from digenrl.trace.device_profile.fit import Fit, fit
from digenrl.trace.device_profile.ladder import Ladder
from digenrl.trace.device_profile.measure import DeviceMeasurement
from digenrl.trace.device_profile.models import ModelName
from digenrl.trace.profile import rounded
from services.scheduler.costs.profile import PROFILES, Device, ProfileFile
from shared.recipe.options import put_options

CONVERTED = ("rollout.call_seconds", "rollout.sample_seconds", "variants.lora.rho")
"""Figures that a profile holds for an H100."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasurementDevice:
    """The device, and how it was measured."""

    name: str
    """Name that the driver gives it."""
    memory_gib: float
    how: str
    """One sentence, for the sources."""


def base_profile(model: ModelName) -> ProfileFile:
    """Returns the committed profile of a model."""
    return ProfileFile.model_validate_json((PROFILES / f"{model}.json").read_text())


def device_kind(name: str, kinds: list[str]) -> str:
    """Returns the profile's name of a device, or a new name for one that it does not know.

    >>> device_kind("NVIDIA H100 80GB HBM3", ["H100", "H20"])
    'H100'
    >>> device_kind("NVIDIA RTX 6000 Ada Generation", ["H100"])
    'RTX-6000-Ada-Generation'
    """
    words = re.findall(r"[A-Za-z0-9]+", name)
    for kind in kinds:
        if kind.lower() in (word.lower() for word in words):
            return kind
    return "-".join(word for word in words if word.lower() not in ("nvidia", "geforce"))[:48]


def measured_profile(
    base: ProfileFile, measured: DeviceMeasurement, on: MeasurementDevice
) -> ProfileFile:
    """Puts what was measured in place of the base's numbers; what was not measured stays."""
    kind = device_kind(on.name, list(base.devices))
    device = base.devices.get(kind) or _new_device(base, measured, on)
    changes = {
        **_generation(measured, device.generation_speed),
        **_training(base, measured, device),
        **_host(measured),
        **_handover(measured),
    }
    notes = dict.fromkeys(changes, on.how) | {
        path: on.how + detail for path, detail in _details(measured).items() if path in changes
    }
    if (device.generation_speed, device.training_speed) != (1, 1):
        for path in set(CONVERTED) & set(notes):
            notes[path] += " Converted by the speeds that this profile gives the device."
    if kind not in base.devices:
        notes[f"devices.{kind}"] = on.how
    sources = {path: {"kind": "measured", "note": note} for path, note in notes.items()}
    plain = put_options(base.model_dump(), rounded(changes))
    plain |= {
        "name": f"{base.name}@{kind}",
        "devices": {**plain["devices"], kind: device.model_dump()},
        "sources": dict(sorted((plain["sources"] | sources).items())),
    }
    return ProfileFile.model_validate(plain)


def row_seconds(
    base: ProfileFile, measured: DeviceMeasurement
) -> tuple[float | None, float | None]:
    """Returns what the device computes in whole groups for a sample's forward pass, and for a
    trained row; None where it is not known, since the host set the pace or nothing fitted."""
    size = base.shape.group_size
    step, trained = _fits(measured)
    return _find_row(step, size), _find_row(trained, size)


def _find_row(model: Fit | None, size: int) -> float | None:
    return model.call / size + model.row if model is not None and model.row else None


def _fits(measured: DeviceMeasurement) -> tuple[Fit | None, Fit | None]:
    """Returns the fits of denoising steps and of training passes, where any fitted the device."""
    ladders = measured.generation.rungs, measured.training.rungs
    step, trained = (fit(rungs) if rungs else None for rungs in ladders)
    return step, trained


def _new_device(base: ProfileFile, measured: DeviceMeasurement, on: MeasurementDevice) -> Device:
    profile = base.trained(base.variants["lora"])
    expected = profile.forward_seconds / profile.variant.forwards_per_step
    forward, row = row_seconds(base, measured)
    if forward is None and measured.generation.rungs:  # no slower than this
        forward = measured.generation.best.per_row
    generation = expected / forward if forward else 1.0
    training = expected * profile.variant.rho / row if row else generation
    return Device(
        generation_speed=rounded(generation),
        training_speed=rounded(training),
        memory_gib=rounded(on.memory_gib),
    )


def _generation(measured: DeviceMeasurement, speed: float) -> dict[str, float]:
    step, _ = _fits(measured)
    if step is None:
        return {}
    changes = {"rollout.memory_gib": measured.generation.frugal.peak_bytes / 2**30}
    if step.row:
        changes["rollout.call_seconds"] = step.call * speed
        changes["rollout.sample_seconds"] = step.row * speed
    return changes


def _host(measured: DeviceMeasurement) -> dict[str, float]:
    """Returns the seconds of a launch, where the host set the pace of some calls."""
    step, trained = _fits(measured)
    if measured.launches is None:
        return {}
    fits = {
        "host.step_launch_seconds": (step, measured.launches.step),
        "host.training_launch_seconds": (trained, measured.launches.training_pass),
    }
    return {path: each.host / n for path, (each, n) in fits.items() if each and each.host}


def _training(base: ProfileFile, measured: DeviceMeasurement, device: Device) -> dict[str, float]:
    """Returns rho over a forward pass in whole groups: the profile then gives what was measured."""
    forward, row = row_seconds(base, measured)
    changes: dict[str, float] = {}
    if measured.optimizer_seconds is not None:
        changes["variants.lora.optimizer_seconds"] = measured.optimizer_seconds
    if measured.training.rungs:
        changes["variants.lora.memory_gib"] = measured.training.frugal.peak_bytes / 2**30
    if row is not None and forward is not None:
        rho = row * device.training_speed / (forward * device.generation_speed)
        changes["variants.lora.rho"] = rho
        factor = _call_factor(measured, row / forward)
        changes |= {} if factor is None else {"variants.lora.call_factor": factor}
    return changes


def _call_factor(measured: DeviceMeasurement, rho: float) -> float | None:
    """Return the fixed seconds of a training pass, over rho times a denoising step's; None if
    either is unknown, or if the step has no fixed part."""
    step, trained = _fits(measured)
    if len(measured.training.rungs) < 2 or step is None or trained is None or not step.call:
        return None
    return trained.call / (rho * step.call)


def _handover(measured: DeviceMeasurement) -> dict[str, float]:
    publication, switch = measured.publication, measured.switch
    changes = {
        "variants.lora.published_gb": publication.num_bytes / 1e9,
        "variants.lora.publish_seconds": publication.seconds,
        "variants.lora.adopt_seconds": publication.pause_seconds,
    }
    if switch is not None:
        both = switch.to_generation_seconds + switch.to_training_seconds
        changes["variants.lora.switch_seconds"] = max(0.0, both / 2)
    return changes


def _details(measured: DeviceMeasurement) -> dict[str, str]:
    """Return details of the sources besides the device, by path."""
    way, switch = measured.publication, measured.switch
    calls = f" max(host, o + c n) fitted to calls of n samples: {_listed(measured.generation)}."
    details = {
        "rollout.call_seconds": calls,
        "rollout.sample_seconds": calls,
        "rollout.memory_gib": " The allocator's peak in the smallest call that is about as fast "
        "as any; no decoder.",
        "variants.lora.memory_gib": " The allocator's peak in the smallest pass that is about as "
        "fast as any, optimizer included.",
        "variants.lora.rho": f" Over a step in whole groups; passes over n rows: "
        f"{_listed(measured.training)}.",
        "variants.lora.call_factor": " What passes of n rows take whatever n is, over rho times "
        "what steps of n samples do.",
        "host.step_launch_seconds": f" {_pace(measured.generation, 'samples')}.",
        "host.training_launch_seconds": f" {_pace(measured.training, 'rows')}.",
        "variants.lora.published_gb": " The adapter in float32.",
        "variants.lora.publish_seconds": f" By way of a folder on the same host: copy "
        f"{way.copy_seconds:.3g}, digest {way.digest_seconds:.3g}, store {way.store_seconds:.3g}, "
        f"read and stage {way.stage_seconds:.3g} s.",
    }
    if switch is not None:
        details["variants.lora.switch_seconds"] = (
            f" Mean of {switch.to_generation_seconds:.3g} s to generation and "
            f"{switch.to_training_seconds:.3g} s back, beyond a usual step; 0 if less."
        )
    return details


def _pace(ladder: Ladder, unit: str) -> str:
    """Describe up to which size the host sets the pace of calls."""
    rows = fit(ladder.rungs).host_bound(ladder.rungs) if ladder.rungs else 0
    return (
        f"the host sets the pace of calls of up to {rows} {unit}" if rows else "the device sets it"
    )


def _listed(ladder: Ladder) -> str:
    parts = [f"{rung.rows}: {rung.seconds:.4g} s" for rung in ladder.rungs]
    if ladder.out_of_memory is not None:
        parts.append(f"{ladder.out_of_memory} do not fit")
    return ", ".join(parts)
