"""Pictures of every page in a browser, at two widths, light and dark: for docs and for review."""
