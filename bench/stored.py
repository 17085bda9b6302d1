"""Results as JSON files: writes them, and reads those of this and earlier versions."""

import json
import os
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
"""The committed ones."""
TWO_DEVICES = "two-devices"
"""File name of the study of two devices; every other file is a case of the emulated cluster."""
RENAMED_MODES = {"naive": "sequential"}
RENAMED_SETTINGS = {"trainer.order = arrival": "trainer.deterministic = False"}

Result = dict[str, Any]


def write_result(path: Path, content: Mapping[str, Any]) -> None:
    """Writes a result, with the machine that it was measured on."""
    machine = {"cpu": platform.processor() or platform.machine(), "cores": os.cpu_count()}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"machine": machine, **content}, indent=1, default=str) + "\n")


def read_results(folder: Path) -> dict[str, Result]:
    """Reads the results of the emulated cluster by the names of their files, in order."""
    plain = {path.stem: json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))}
    cases = {name: each for name, each in plain.items() if "floor_seconds" in each}
    for case in cases.values():
        case["modes"] = _named_as_today(case["modes"])
    return cases


def read_two_devices(folder: Path) -> Result | None:
    """Reads the result of the study of two devices, if the folder has one."""
    path = folder / f"{TWO_DEVICES}.json"
    if not path.is_file():
        return None
    found: Result = json.loads(path.read_text())
    for part in found["parts"].values():
        part["modes"] = _named_as_today(part["modes"])
    for part, words in found["changes"].items():
        settings = (RENAMED_SETTINGS.get(each, each) for each in words.split(", "))
        found["changes"][part] = ", ".join(settings)
    return found


def _named_as_today(modes: list[Result]) -> list[Result]:
    return [{**mode, "mode": RENAMED_MODES.get(mode["mode"], mode["mode"])} for mode in modes]
