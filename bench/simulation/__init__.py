"""Simulates one split of devices, and models of colocated systems for comparison."""
