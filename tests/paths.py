"""Where the repository keeps what tests read."""

from pathlib import Path

ROOT = Path(__file__).parents[1]
RECIPES = ROOT / "recipes"
DIGITS = RECIPES / "digits.toml"
VECTORS = ROOT / "tests" / "vectors"
"""Reference values that other programs have computed."""
