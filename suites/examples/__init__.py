"""Sides that can be tried out: see ``suites.sides``."""
