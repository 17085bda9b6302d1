"""Which devices generate and which train: every split forecast, the best ones simulated."""
