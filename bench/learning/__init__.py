"""How much held-out accuracy each choice of a recipe buys: `make bench-learning`.

choices.py   what is compared        task.py     on what, and what counts as learned
loop.py      one run in one process  work.py     what it has cost
case.py      a run with evaluations  suite.py    many of them, two at a time
figures.py   what a table says       output.py   tables and curves
services.py  two recipes by turns, through the real services
"""
