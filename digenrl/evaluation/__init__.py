"""How good policy versions are, measured before, during and after a run (docs/evaluation.md)."""
