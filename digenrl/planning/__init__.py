"""What `digenrl plan`, `digenrl sim` and `digenrl check` ask of the scheduler's planner."""
