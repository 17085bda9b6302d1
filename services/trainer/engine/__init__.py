"""Trains real networks: in one process, on replicas, on ranks."""
