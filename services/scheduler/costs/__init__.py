"""Costs of work as data: service times, the bound that no schedule beats, colocated baselines."""
