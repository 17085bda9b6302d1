"""A whole run on one machine: brokers and services as supervised child processes."""
