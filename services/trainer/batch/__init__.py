"""One batch: its groups are fetched, trained in order, and measured."""
