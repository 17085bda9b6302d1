"""Where the repository keeps what tests read."""

from pathlib import Path

ROOT = Path(__file__).parents[1]
RECIPES = ROOT / "recipes"
DEMO = RECIPES / "digits.toml"
DIGITS = ROOT / "bench" / "learning" / "digits.toml"
"""A plain recipe of the demo's model, which stays as it is whatever the demo learns by next."""
VECTORS = ROOT / "tests" / "vectors"
"""Reference values that other programs have computed."""
