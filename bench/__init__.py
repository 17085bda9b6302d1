"""What DigenRL gains, measured: `python -m bench`, from a clone. None of it is installed."""

from pathlib import Path

ROOT = Path(__file__).parents[1]
FROM_CLONE = {"PYTHONPATH": str(ROOT)}
"""Environment of child processes that import `bench`: a supervisor keeps them from finding it in
the folder that somebody works in."""
