"""Certificates, keys and tokens."""
