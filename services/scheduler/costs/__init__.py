"""What work costs, as data: service times, the bound no schedule beats, colocated baselines."""
