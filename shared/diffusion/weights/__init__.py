"""Trained weights: adapters, shards, checksums and files."""
