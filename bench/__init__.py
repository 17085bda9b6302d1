"""What the methods really cost, measured: ``python -m bench`` from a clone; it is not installed."""
