"""Answers `digenrl plan`, `digenrl sim` and `digenrl check` with the scheduler's planner."""
