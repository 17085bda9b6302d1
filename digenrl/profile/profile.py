"""What was measured, as a cost profile: the project's own of that model, with measured numbers.

The seconds of a profile are those of an H100. A device that the profile knows is taken to be as
fast as it says, and what was measured is converted by that; a device that it does not know enters
with the speed at which its measured seconds are those that the profile had.
"""

import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from digenrl.profile.ladder import Ladder, call_and_row_seconds
from digenrl.profile.measure import DeviceMeasurement
from digenrl.profile.models import ModelName
from services.scheduler.costs.profile import (
    PROFILES,
    Device,
    Profile,
    ProfileFile,
    Source,
    VariantName,
)

DIGITS = 4
CONVERTED = ("rollout.call_seconds", "rollout.sample_seconds", "variants.lora.rho")
"""What a profile holds for an H100."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredOn:
    """The device, and how it was measured."""

    name: str
    """Name that the driver gives it."""
    memory_gib: float
    how: str
    """One sentence, for the sources."""


def base_profile(model: ModelName) -> ProfileFile:
    """Returns the committed profile of a model, or assumptions where there is none."""
    path = PROFILES / f"{model}.json"
    if path.exists():
        return ProfileFile.model_validate_json(path.read_text())
    return _assumed(model)


def device_kind(name: str, known: list[str]) -> str:
    """Returns the profile's name of a device, or a new name for one that it does not know.

    >>> device_kind("NVIDIA H100 80GB HBM3", ["H100", "H20"])
    'H100'
    >>> device_kind("NVIDIA RTX 6000 Ada Generation", ["H100"])
    'RTX-6000-Ada-Generation'
    """
    words = re.findall(r"[A-Za-z0-9]+", name)
    for kind in known:
        if kind.lower() in (word.lower() for word in words):
            return kind
    return "-".join(word for word in words if word.lower() not in ("nvidia", "geforce"))[:48]


def measured_profile(base: ProfileFile, measured: DeviceMeasurement, on: MeasuredOn) -> ProfileFile:
    """Puts what was measured in place of the base's numbers; what was not measured stays."""
    kind = device_kind(on.name, list(base.devices))
    device = base.devices.get(kind) or _new_device(base, measured, on)
    changes = {
        **_generation(measured, device.generation_speed),
        **_training(base, measured, device),
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
    sources = {path: _source(note) for path, note in notes.items()}
    plain = base.model_dump()
    for path, value in changes.items():
        _set(plain, path, _rounded(value))
    plain |= {
        "name": f"{base.name}@{kind}",
        "devices": {**plain["devices"], kind: device.model_dump()},
        "sources": dict(sorted((plain["sources"] | sources).items())),
    }
    return ProfileFile.model_validate(plain)


def profile_of(costs: ProfileFile, variant: VariantName = "lora") -> Profile:
    plain: dict[str, Any] = {
        field: getattr(costs, field) for field in ProfileFile.model_fields if field != "variants"
    }
    return Profile(**plain, variant=costs.variants[variant])


def write_profile(costs: ProfileFile, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(costs.model_dump_json(indent=2, exclude_defaults=True) + "\n")


def row_seconds(
    base: ProfileFile, measured: DeviceMeasurement
) -> tuple[float | None, float | None]:
    """Returns the seconds of a forward pass per sample in whole groups, and of a trained row."""
    forward = None
    if measured.generation.rungs:
        call, sample = call_and_row_seconds(measured.generation.rungs)
        forward = call / base.shape.group_size + sample
    row = measured.training.best.per_row if measured.training.rungs else None
    return forward, row


def _new_device(base: ProfileFile, measured: DeviceMeasurement, on: MeasuredOn) -> Device:
    profile = profile_of(base)
    expected = profile.forward_seconds / profile.variant.forwards_per_step
    forward, row = row_seconds(base, measured)
    generation = expected / forward if forward else 1.0
    training = expected * profile.variant.rho / row if row else generation
    return Device(
        generation_speed=_rounded(generation),
        training_speed=_rounded(training),
        memory_gib=_rounded(on.memory_gib),
    )


def _generation(measured: DeviceMeasurement, speed: float) -> dict[str, float]:
    if not measured.generation.rungs:
        return {}
    call, sample = call_and_row_seconds(measured.generation.rungs)
    return {
        "rollout.call_seconds": call * speed,
        "rollout.sample_seconds": sample * speed,
        "rollout.memory_gib": measured.generation.frugal.peak_bytes / 2**30,
    }


def _training(base: ProfileFile, measured: DeviceMeasurement, device: Device) -> dict[str, float]:
    """Returns rho over a forward pass in whole groups: the profile then gives what was measured."""
    forward, row = row_seconds(base, measured)
    changes: dict[str, float] = {}
    if measured.optimizer_seconds is not None:
        changes["variants.lora.optimizer_seconds"] = measured.optimizer_seconds
    if row is not None:
        changes["variants.lora.memory_gib"] = measured.training.frugal.peak_bytes / 2**30
    if row is not None and forward is not None:
        rho = row * device.training_speed / (forward * device.generation_speed)
        changes["variants.lora.rho"] = rho
        factor = _call_factor(measured, row / forward)
        changes |= {} if factor is None else {"variants.lora.call_factor": factor}
    return changes


def _call_factor(measured: DeviceMeasurement, rho: float) -> float | None:
    """Returns the seconds of a training pass that its rows do not add to, over rho times those of a
    denoising step; None if either is not known, or if the step has none."""
    if len(measured.training.rungs) < 2:
        return None
    of_step, _ = call_and_row_seconds(measured.generation.rungs)
    of_pass, _ = call_and_row_seconds(measured.training.rungs)
    return of_pass / (rho * of_step) if of_step else None


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
    """Returns what the sources say beside the device, by path."""
    way, switch = measured.publication, measured.switch
    calls = f" o + c n fitted to calls of n samples: {_listed(measured.generation)}."
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


def _listed(ladder: Ladder) -> str:
    found = [f"{rung.rows}: {rung.seconds:.4g} s" for rung in ladder.rungs]
    if ladder.out_of_memory is not None:
        found.append(f"{ladder.out_of_memory} do not fit")
    return ", ".join(found)


def _assumed(model: ModelName) -> ProfileFile:
    """Returns what is known of FLUX.1-dev, brought to the size of Stable Diffusion 3.5 Medium."""
    if model is not ModelName.sd35_medium:
        raise ValueError(f"{model} has a profile of its own, which is missing in {PROFILES}")
    plain = base_profile(ModelName.flux1_dev).model_dump()
    plain |= {
        "name": str(model),
        "description": "Stable Diffusion 3.5 Medium 2.2B, 512x512, 10 steps of which 2 are "
        "trained, with guidance",
        "shape": {"groups": 32, "group_size": 16, "steps": 10, "trained_steps": 2, "updates": 2},
    }
    assumed = {
        "rollout.call_seconds": 0.02,
        "rollout.sample_seconds": 0.01,
        "rollout.decode_seconds": 0.03,
        "rollout.memory_gib": 6.0,
        "variants.lora.forwards_per_step": 2,
        "variants.lora.memory_gib": 12.0,
        "variants.lora.published_gb": 0.075,
        "variants.full.forwards_per_step": 2,
        "variants.full.memory_gib": 14.0,
        "variants.full.published_gb": 4.5,
        "variants.full.publish_seconds": 0.6,
        "colocated.engine_gb": 15.0,
    }
    for path, value in assumed.items():
        _set(plain, path, value)
    guessed = _source("Guessed from its size and that of FLUX.1-dev.", "assumed")
    taken_over = _source("As FLUX.1-dev.", "assumed")
    plain["sources"] = {
        path: source if path.startswith("devices.") else taken_over
        for path, source in plain["sources"].items()
    } | dict.fromkeys(assumed, guessed)
    return ProfileFile.model_validate(plain)


def _source(note: str, kind: str = "measured") -> dict[str, str]:
    return Source.model_validate({"kind": kind, "note": note}).model_dump()


def _set(plain: dict[str, Any], path: str, value: float) -> None:
    *tables, field = path.split(".")
    for table in tables:
        plain = plain[table]
    plain[field] = value


def _rounded(value: float) -> float:
    """Rounds to the digits that count."""
    if value == 0:
        return 0.0
    return round(value, DIGITS - 1 - math.floor(math.log10(abs(value))))
