"""Figures of the project's performance study that profiles, bounds and baselines must reproduce.

Seconds per batch of 32 groups, simulated with the costs that the profiles are fitted to.
"""

from dataclasses import dataclass

from services.scheduler.costs.profile import VariantName


@dataclass(frozen=True)
class Row:
    profile: str
    variant: VariantName
    devices: dict[str, int]
    floor: float
    oldest: float | None
    """Colocated as of 2026-06."""
    batched: float | None
    tuned: float

    def __str__(self) -> str:
        pool = "+".join(f"{count}-{kind}" for kind, count in self.devices.items())
        return f"{self.profile}-{self.variant}-{pool}"


def _equal(variant: VariantName, number: int, rows: dict[str, tuple[float, ...]]) -> list[Row]:
    return [Row(name, variant, {"H100": number}, *figures) for name, figures in rows.items()]


def _mixed(name: str, kind: str, floor: float, oldest: float, tuned: float) -> Row:
    return Row(name, "lora", {"H100": 16, kind: 16}, floor, oldest, None, tuned)


HOMOGENEOUS = [
    *_equal("lora", 16, {
        "qwen-image": (60.9, 140, 113, 67),
        "flux1-dev": (124.1, 192, 179, 130),
        "wan2.1-14b": (834.2, 1042, 1027, 845),
        "hunyuanvideo": (1723.7, 2092, 2085, 1735),
    }),
    *_equal("lora", 32, {
        "qwen-image": (30.4, 93, 80, 37),
        "flux1-dev": (62.0, 111, 105, 68),
        "wan2.1-14b": (417.1, 538, 532, 427),
        "hunyuanvideo": (861.9, 1065, 1062, 872),
    }),
    *_equal("full", 16, {
        "qwen-image": (41.1, 111, 97, 54),
        "flux1-dev": (149.0, 222, 209, 160),
        "wan2.1-14b": (987.0, 1201, 1185, 1003),
        "hunyuanvideo": (2044.0, 2418, 2411, 2061),
    }),
    *_equal("full", 32, {
        "qwen-image": (20.5, 81, 75, 33),
        "flux1-dev": (74.5, 128, 122, 85),
        "wan2.1-14b": (493.5, 620, 614, 508),
        "hunyuanvideo": (1022.0, 1230, 1227, 1037),
    }),
]  # fmt: skip

HETEROGENEOUS = [
    _mixed("qwen-image", "A100", 42, 124, 58),
    _mixed("qwen-image", "H20", 47, 140, 67),
    _mixed("qwen-image", "L40S", 48, 140, 67),
    _mixed("flux1-dev", "A100", 86, 192, 129),
    _mixed("flux1-dev", "H20", 95, 192, 130),
    _mixed("flux1-dev", "L40S", 97, 192, 130),
    _mixed("wan2.1-14b", "A100", 581, 1027, 813),
    _mixed("wan2.1-14b", "H20", 640, 1042, 845),
    _mixed("wan2.1-14b", "L40S", 653, 1042, 845),
    _mixed("hunyuanvideo", "A100", 1201, 2074, 1672),
    _mixed("hunyuanvideo", "H20", 1323, 2092, 1735),
    _mixed("hunyuanvideo", "L40S", 1349, 2092, 1735),
]

NAMES = ("flux1-dev", "hunyuanvideo", "qwen-image", "wan2.1-14b")
