"""What a run leaves for people: figures before and after, curves, a gallery, the adapter."""
