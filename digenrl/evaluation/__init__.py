"""Evaluates policy versions before, during and after a run (docs/evaluation.md)."""
