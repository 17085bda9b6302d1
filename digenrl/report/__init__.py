"""Makes a run's report: figures before and after, curves, a gallery, the adapter."""
