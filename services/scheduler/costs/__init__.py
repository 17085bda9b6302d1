"""Costs of work as data: service times, and the bound that no schedule beats."""
