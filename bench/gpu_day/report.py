"""Writes what the parts have found, as Markdown."""

import re
from collections.abc import Iterator, Mapping
from typing import Any

from bench.full_size.run import GB, machine
from shared.learning.metrics import ALARMING_RATIO_ERROR

Found = Mapping[str, Any]


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
        if parts.get(name, {}).get("status") == "done":
            lines += [f"## {titles[name]}", "", *show(parts[name]["found"], parts), ""]
    return "\n".join(lines)


def _status(part: Found) -> str:
    if not part:
        return "not run"
    return "done" if part["status"] == "done" else f"**failed**: {part['reason']}"


def _families(found: Found, parts: Mapping[str, Any]) -> Iterator[str]:
    yield "Largest |ratio - 1| of a replay in passes of 1, 3, 6 and 12 rows; how far latents of"
    yield "the same noise are from those of the CPU, over their own spread:"
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
    yield f"What was measured of `{found['name']}`; the whole profile is in the JSON file."
    yield ""
    yield "| | |"
    yield "|---|---|"
    for path, source in found["sources"].items():
        if source["kind"] == "measured" and path.startswith(("rollout.", "variants.lora.")):
            value: Any = found
            for key in path.split("."):
                value = value[key]
            yield f"| {path} | {value} |"


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
    yield f"| whole run, report included | {found['seconds']:.0f} s |"
    yield f"| most main memory of all processes | {found['peak_bytes'] / GB:.2f} GB |"


SHOWN = {"families": _families, "memory": _memory, "profile": _profile, "services": _services}
