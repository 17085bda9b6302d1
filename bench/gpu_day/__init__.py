"""`make gpu-day`: what can only be shown on a CUDA machine, in one script and one report.

`day` runs the parts, each in a process of its own; `families`, `memory`, `profiled` and `services`
are the parts; `report` writes what they found.
"""
