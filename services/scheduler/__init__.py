"""Decides what is generated and trained, and when. Never touches a tensor; needs no torch."""
