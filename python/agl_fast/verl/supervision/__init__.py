"""Deadlines, signals and clean-up: how a run and its processes end."""
