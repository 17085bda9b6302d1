"""Results as tables: every figure in the row and column where readers look for it."""

from typing import Any

import pytest

from bench.cluster.modes import MODES
from bench.stored import read_results
from bench.summary import MISSING, STARVED, summary
from bench.tables import tables
from bench.typed import typed
from tests.paths import ROOT

BEST = "1 H100 : 31 H100"


def result(
    workload: str, modes: dict[str, float], *, devices: dict[str, int] | None = None,
    split: str = BEST,
) -> dict[str, Any]:  # fmt: skip
    return {
        "workload": workload, "devices": devices or {"H100": 32}, "scale": 10.0,
        "floor_seconds": 30.0, "colocated_2026_06": 90.0, "colocated_tuned": 36.0,
        "modes": [
            {
                "mode": mode, "split": split, "fragment_size": 8, "tag": 3,
                "step_seconds": 30.0 / utilisation, "fastest": 30.0, "slowest": 40.0,
                "utilisation": utilisation, "deviation": 0.012, "over_2026_06": 3 * utilisation,
                "over_tuned": 1.2 * utilisation, "over_colocated": None, "overhead_ms": 40.0,
                "overhead_share": 0.001,
            }
            for mode, utilisation in modes.items()
        ],
    }  # fmt: skip


RESULTS = [
    result("qwen-image", {"tag": 0.5, "one-step": 0.75}, split=STARVED),
    result("qwen-image", {"sequential": 0.25, "tag": 0.9, "one-step": 0.95}),
    result("flux1-dev", {"one-step": 0.8}, devices={"H100": 16, "H20": 16}),
]


def rows(text: str, name: str) -> list[list[str]]:
    lines = (line for line in text.splitlines() if line.startswith(f"| {name} "))
    return [[cell.strip() for cell in line.strip("|").split("|")][1:] for line in lines]


def test_best_and_far_splits_stand_in_columns_of_their_own() -> None:
    utilisation, ratios, ladder = rows(summary(RESULTS), "Qwen-Image")
    assert utilisation[:2] == ["0.900 (+1.2%)†", "0.950 (+1.2%)†"]
    assert utilisation[2:5] == [MISSING] * 3
    assert utilisation[5:] == ["0.500 (+1.2%)†", "0.750 (+1.2%)†", MISSING, MISSING]
    assert ratios[0] == f"2.70 / 1.08 / {MISSING}†"
    assert ladder[0] == "120.0; 40 ms, 0.10%‡" and ladder[1] == MISSING and ladder[-1] == "30.0"


def test_unequal_devices_stand_by_their_kind() -> None:
    _, ratios, ladder = rows(summary(RESULTS), "FLUX.1-dev")
    assert ratios == [MISSING, MISSING, MISSING, "2.40 / 0.96†", MISSING]
    assert set(ladder) == {MISSING}


def test_every_case_has_a_table_of_its_modes() -> None:
    text = tables(RESULTS)
    assert text.count("\n### ") == 3 + len(RESULTS)
    assert f"### qwen-image, 32 H100, {STARVED}" in text
    assert [row[3] for row in rows(text, "one-step")] == ["40.0 (30.0–40.0)", "31.6 (30.0–40.0)",
                                                          "37.5 (30.0–40.0)"]  # fmt: skip


@pytest.mark.parametrize(
    ("split", "name", "tag", "words"),
    [
        ("24 H100 : 8 H100", "tsp", 0, "yes"),
        ("24 H100 : 8 H100", "tag", 5, "yes"),
        ("8 H100 : 24 H100", "tsp", 0, "as ranks"),
        ("8 H100 : 24 H100", "tag", 5, "no: lends a trainer of 24 devices, and a host has 8"),
        ("none : 16 H100", "colocated", 0, "no: lends a trainer of 16 devices, and a host has 8"),
        ("8 H100 : 4 H100 + 4 A100", "tsp", 0, "no: trains on unlike devices, 4 H100 + 4 A100"),
        (
            "8 L40S : 8 H100",
            "tsp",
            0,
            "no: qwen-image needs 58.8 GiB on a rollout device; L40S has 44 GiB",
        ),
    ],
)
def test_a_row_says_whether_a_recipe_can_say_it(
    split: str, name: str, tag: int, words: str
) -> None:
    mode = {"mode": name, "split": split, "fragment_size": 4, "tag": tag}
    assert typed("qwen-image", mode).words == words


def test_the_published_tables_are_those_of_the_published_results() -> None:
    text = tables(list(read_results(ROOT / "bench" / "results").values()))
    assert text == (ROOT / "docs" / "performance" / "tables.md").read_text()
    counted = next(line for line in text.splitlines() if line.startswith("Of 64 rows"))
    rows = [row[-1] for name in MODES for row in rows_of_cases(text, name)]
    assert len(rows) == 64
    yes, ranks = rows.count("yes"), rows.count("as ranks")
    assert f" {yes} can be run as they are" in counted and f" {ranks} with ranks" in counted
    assert f" {64 - yes - ranks} cannot be run" in counted
    assert counted in (ROOT / "docs" / "performance.md").read_text()


def rows_of_cases(text: str, name: str) -> list[list[str]]:
    return rows(text[text.index("## Every case") :], name)
