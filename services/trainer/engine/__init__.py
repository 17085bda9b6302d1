"""The optimizer on real networks: of one process, of replicas, of ranks."""
