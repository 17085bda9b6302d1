"""Two CPU cores as two devices: what each scheduling technique gains on real processes.

modes.py     the schedules that are compared, as changes to a recipe
shapes.py    the model and the batches, and how large they are
placement.py which process runs on which core (pinned.py starts it there)
session.py   brokers that serve every run        run.py      one run, and what was heard of it
events.py    messages -> intervals of work       bound.py    the least time of a batch
compare.py   medians, spreads, ratios, targets   output.py   tables, JSON and plots
study.py     which runs, in which order         program.py  all of it; command.py: its command line
"""
