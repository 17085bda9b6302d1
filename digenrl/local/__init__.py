"""Runs everything on one machine: brokers and services as supervised child processes."""
