"""Answers `digenrl plan` and `digenrl check` with the scheduler's planner."""
