"""A cluster in virtual time, around the scheduler's own core: planner's look-ahead and test bed."""
