"""A cluster in virtual time, around the scheduler's own core: for forecasts and plans."""
