"""The console command: starts runs and services, trains the demo model, reports results."""
