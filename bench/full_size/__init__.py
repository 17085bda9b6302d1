"""`python -m bench full-size`: SD3.5-M at its published size, with random weights, through the real
services.

`model` writes the folder, `recipe` the recipe, `watch` measures the memory of all processes of a
run and notes what they do, `run` puts them together and writes the report.
"""
