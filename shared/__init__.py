"""Shared by all services: messages, bus, object store, versions. Knows no service."""
