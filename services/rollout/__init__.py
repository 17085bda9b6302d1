"""Generates the fragments that it is given, under the policy version that they name."""
