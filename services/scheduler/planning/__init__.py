"""Plans which devices generate and which train: forecasts every split, simulates the best."""
