"""`make gpu-day`: what can only be shown on a CUDA machine, in one script and one report.

`day` runs the parts, each in a process of its own, all or those of a quarter of an hour; `report`
writes what they found; the other modules are the parts.
"""
