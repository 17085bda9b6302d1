"""Writes what the parts have found, as Markdown."""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from bench.full_size.run import GB, machine
from digenrl.trace.device_profile.models import ModelName
from shared.learning.metrics import ALARMING_RATIO_ERROR

Found = Mapping[str, Any]


def keep(folder: Path, name: str, found: Found) -> None:
    """Stores what a part has found, or has found so far."""
    path = folder / "parts" / f"{name}.found"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(found, indent=1))


def device_words(cpu: bool) -> str:
    """Names the device that the day is about."""
    import torch

    return "cpu" if cpu or not torch.cuda.is_available() else torch.cuda.get_device_name(0)


def file_name(device: str) -> str:
    """
    >>> file_name("NVIDIA H100 80GB HBM3")
    'nvidia-h100-80gb-hbm3'
    """
    return re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-")


def markdown(content: Found, titles: Mapping[str, str]) -> str:
    """Returns the report of a day, whose parts may have failed or not have run yet."""
    parts, tiny = content["parts"], content["tiny"]
    lines = [f"# A day on {content['device']}", ""]
    if tiny:
        lines += ["A rehearsal with tiny networks: its figures say nothing of a GPU.", ""]
    lines += [f"Machine: {machine()}. Made by `make gpu-day`.", ""]
    lines += ["| part | | seconds |", "|---|---|---|"]
    for name, part in parts.items():
        lines.append(f"| {titles[name]} | {_status(part)} | {part.get('seconds', '')} |")
    lines.append("")
    for name, show in SHOWN.items():
        if parts.get(name, {}).get("found"):  # a part that failed may have found something
            lines += [f"## {titles[name]}", "", *show(parts[name]["found"], parts), ""]
    return "\n".join(lines)


def _status(part: Found) -> str:
    if not part:
        return "not run"
    return "done" if part["status"] == "done" else f"**failed**: {part['reason']}"


def _families(found: Found, parts: Mapping[str, Any]) -> Iterator[str]:
    yield "Largest |ratio - 1| of a replay in passes of 1, 3, 6 and 12 rows; distance of latents"
    yield "from the latents of the CPU for the same noise, divided by their own spread:"
    yield ""
    yield "| | float32 | bfloat16 | latents, float32 | bfloat16 |"
    yield "|---|---|---|---|---|"
    other = parts.get("families-cpu", {}).get("found", {})
    for family, types in found.items():
        if family == "device":
            continue
        errors = [max(each["ratio_error"].values()) for each in types.values()]
        marked = [f"{error:.1e}{' !' * (error > ALARMING_RATIO_ERROR)}" for error in errors]
        away = [_distance(each, other.get(family, {}).get(dtype)) for dtype, each in types.items()]
        yield f"| {family} | {' | '.join([*marked, *away])} |"


def _distance(found: Found, other: Found | None) -> str:
    if other is None:
        return "-"
    pairs = list(zip(found["latents"], other["latents"], strict=True))
    spread = sum(theirs**2 for _, theirs in pairs)
    return f"{(sum((mine - theirs) ** 2 for mine, theirs in pairs) / spread) ** 0.5:.1e}"


def _memory(found: Found, _: Mapping[str, Any]) -> Iterator[str]:
    yield "| | traced, MiB | measured, MiB | difference |"
    yield "|---|---|---|---|"
    for name, row in found["rows"].items():
        measured, difference = row["measured"], row["difference"]
        known = measured is not None
        yield (
            f"| {name} | {row['traced'] / 2**20:.1f} | "
            f"{f'{measured / 2**20:.1f}' if known else '-'} | "
            f"{f'{difference:+.1%}' if difference is not None else '-'} |"
        )
    yield ""
    words = {None: "not measured on a CPU", True: "yes", False: "**no**"}
    yield f"All within {found['within']:.0%}: {words[found['passed']]}."


def _profile(found: Found, _: Mapping[str, Any]) -> Iterator[str]:
    yield f"Measurements of `{found['name']}`; the whole profile is in the JSON file."
    yield ""
    yield "| | measured | shipped profile | |"
    yield "|---|---|---|---|"
    for path, source in found["sources"].items():
        if source["kind"] == "measured" and path.startswith(("rollout.", "variants.lora.")):
            value, shipped = _at(found, path), _at(found["shipped"], path)
            before = found["shipped"]["sources"].get(path, {}).get("kind", "by its table")
            known = "-" if shipped is None else f"{shipped} ({before})"
            yield f"| {path} | {value} | {known} | {_times(value, shipped)} |"


def _at(plain: Any, path: str) -> Any:
    for key in path.split("."):
        plain = plain.get(key) if plain is not None else None
    return plain


def _times(value: float, shipped: float | None) -> str:
    return f"{value / shipped:.2f} x" if shipped else "-"


def _passes(found: Found, _: Mapping[str, Any]) -> Iterator[str]:
    head = "| weights | ms | the first, s | decode and pack a sample, ms | weights, GiB | waited |"
    if "denoising" in found:
        yield from ("A denoising step of all samples of a group, with guidance:", "", head)
        yield from _forms(found["denoising"], _denoised, columns=6)
        yield ""
    yield f"A training pass of {found['rows']} rows, and where the host waited in a whole group:"
    yield ""
    yield "| gradient | ms | the first group, s | error of the ratio | waited |"
    yield from _forms(found.get("training", {}), _trained, columns=5)


def _forms(
    forms: Mapping[str, Found], cells: Callable[[Found], Sequence[str]], *, columns: int
) -> Iterator[str]:
    """Yields the rows of a table below its head: a form that failed has its reason alone."""
    yield "|---" * columns + "|"
    for name, form in forms.items():
        failed = [f"**{form.get('failed')}**", *[""] * (columns - 2)]
        shown = failed if "failed" in form else cells(form)
        yield f"| {' | '.join([name, *shown])} |"


def _denoised(form: Found) -> list[str]:
    held, decoded = form["weights_bytes"], form["finish"] / form["samples"]
    return [
        _ms(form["step"]), f"{form['first_step']:.1f}", _ms(decoded),
        f"{held / 2**30:.2f}" if held else "-", _places(form["waits"]),
    ]  # fmt: skip


def _trained(form: Found) -> list[str]:
    return [
        _ms(form["pass"]), f"{form['first_group']:.1f}", f"{form['onpolicy_ratio_error']:.1e}",
        _places(form["waits"]),
    ]  # fmt: skip


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1e3:.1f}"


def _places(waits: Mapping[str, int] | None) -> str:
    if waits is None:
        return "not counted on a CPU"
    return ", ".join(f"{count} x {place}" for place, count in waits.items()) or "nowhere"


COMMIT = {
    "step": "optimizer step, with its norm",
    "checksum": "checksum of weights and moments",
    "held_with_new_buffers": "copy, into new buffers: the lanes are held",
    "held": "copy, into kept buffers: the lanes are held",
    "digested": "until the digests are taken",
    "published": "until the weights are stored",
    "checkpointed": "until the optimizer's state is",
    "process_group_of_one": "total of a process group of one member",
}


def _commits(found: Found, _: Mapping[str, Any]) -> Iterator[str]:
    adapter, copied = found["adapter_gb"], found["copied_gb"]
    yield f"An adapter of {adapter:.3g} GB; with its optimizer state {copied:.3g} GB are copied."
    yield ""
    yield "| | seconds | per GB |"
    yield "|---|---|---|"
    for key, words in COMMIT.items():
        size = adapter if key in ("published", "process_group_of_one") else copied
        if found.get(key) is not None:
            yield f"| {words} | {found[key]:.4f} | {found[key] / size:.3f} |"


def _services(found: Found, _: Mapping[str, Any]) -> Iterator[str]:
    groups, size = found["batch"]
    changes = ", ".join(f"{key} = {value}" for key, value in found["changes"].items())
    yield "| | |"
    yield "|---|---|"
    yield f"| devices | {changes} |"
    yield f"| optimizer steps committed | {found['commits']} |"
    yield f"| samples of a batch | {groups} groups of {size} |"
    yield f"| samples trained | {found['samples_trained']} |"
    yield f"| largest on-policy error of a ratio | {found['onpolicy_ratio_error_max']:.2g} |"
    if found.get("killed"):
        yield f"| killed after the first step | {', '.join(found['killed'])} |"
    for version, by_worker in found.get("checksums", {}).items():
        yield f"| checksum of version {version} | {_agreement(by_worker)} |"
    schedule = found["schedule"]
    if schedule["seconds_per_step"] is not None:
        yield f"| a step, median | {schedule['seconds_per_step']:.2f} s |"
        yield f"| devices that generate or train are busy | {schedule['utilisation']:.3f} |"
        for what, share in schedule["bubbles"].items():
            yield f"| of the rest: {what} | {share:.3f} |"
    yield f"| whole run, report included | {found['seconds']:.0f} s |"
    yield f"| most main memory of all processes | {found['peak_bytes'] / GB:.2f} GB |"


def _agreement(by_worker: Mapping[str, str]) -> str:
    different = set(by_worker.values())
    if len(different) == 1:
        return f"{different.pop()}, of {len(by_worker)}"
    return "**not the same**: " + ", ".join(f"{who} {sum}" for who, sum in by_worker.items())


def _doctor(found: Found, _: Mapping[str, Any]) -> Iterator[str]:
    yield "| | | |"
    yield "|---|---|---|"
    for each in found["findings"]:
        yield f"| {each['check']} | {each['state']} | {each['found']} |"


def _steady(found: Found, parts: Mapping[str, Any]) -> Iterator[str]:
    """Yields seconds of the services' steps, of their engines without services, and of a plain
    loop: rollout, then training."""
    steps, samples = found["steps"], found["samples"]
    yield f"Seconds from commit to commit, of {samples} samples each: "
    yield f"{', '.join(f'{each:.2f}' for each in steps) or 'none was seen'}. The first counts from "
    yield "the start of `digenrl up`."
    if len(steps) < 3:
        return
    yield ""
    yield "| a step | s | samples per second |"
    yield "|---|---|---|"
    yield _rate("services, median without the first two", median(steps[2:]), samples)
    rates = parts.get("loop", {}).get("found", {})
    for prefix, words in (("", "their engines alone"), ("plain_", "a plain diffusers loop")):
        if rates:
            each = [median(rates[f"{prefix}{what}"]) for what in ("rollout", "trainer")]
            yield _rate(words, sum(samples / rate for rate in each), samples)


def _rate(words: str, seconds: float, samples: int) -> str:
    return f"| {words} | {seconds:.2f} | {samples / seconds:.2f} |"


def _loop(found: Found, _: Mapping[str, Any]) -> Iterator[str]:
    yield "| samples per second, medians by turns | plain loop | ours | ratio |"
    yield "|---|---|---|---|"
    for what in ("rollout", "trainer"):
        plain, ours = median(found[f"plain_{what}"]), median(found[what])
        yield f"| {what} | {plain:.2f} | {ours:.2f} | {found[f'{what}_ratio']:.2f} |"


def _decoders(found: Found, _: Mapping[str, Any]) -> Iterator[str]:
    yield "| decoder of a sample | traced, GiB | measured, GiB | factor | s |"
    yield from _forms(found, _decoded, columns=5)


def _decoded(form: Found) -> list[str]:
    known = form["measured"] is not None
    return [
        f"{form['traced'] / 2**30:.2f}", f"{form['measured'] / 2**30:.2f}" if known else "-",
        f"{form['factor']:.2f}" if known else "-", f"{form['seconds']:.2f}",
    ]  # fmt: skip


def _rewards(found: Found, _: Mapping[str, Any]) -> Iterator[str]:
    yield "| | s per image | operations per second, in 1e12 | charged |"
    yield "|---|---|---|---|"
    for name, each in found.items():
        rates = [f"{each[key] / 1e12:.3g}" for key in ("operations", "charged")]
        yield f"| {name} | {each['seconds']:.3g} | {' | '.join(rates)} |"


SHOWN = {
    "families": _families, "memory": _memory, "passes": _passes, "commits": _commits,
    "profile": _profile, **{f"profile-{model}": _profile for model in ModelName},
    "services": _services, "services-shared": _services, "services-lent": _services,
    "doctor": _doctor, "services-steady": _steady, "loop": _loop, "compiled": _passes,
    "decoders": _decoders, "rewards": _rewards, "rewards-cpu": _rewards,
}  # fmt: skip
