"""Makes the models of the digits demo: `python -m bench digits`, `python -m bench digits-edit`."""
