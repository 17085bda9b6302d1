"""Two CPU cores as two devices: what each scheduling technique gains on real processes.

modes.py     the schedules that are compared, as changes to a recipe
study.py     which runs are made of which model    run.py     one run
intervals.py messages -> intervals of work         bound.py   the least time of a batch
compare.py   medians, spreads, ratios, targets     output.py  tables, JSON and pictures
"""
