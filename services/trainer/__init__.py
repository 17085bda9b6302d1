"""Trains groups as they become whole, and commits one optimizer step per batch."""
