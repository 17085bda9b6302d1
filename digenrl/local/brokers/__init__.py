"""Brokers of a local run and of a deployment."""
