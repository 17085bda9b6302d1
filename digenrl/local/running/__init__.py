"""Processes and display of `digenrl up` during a run."""
