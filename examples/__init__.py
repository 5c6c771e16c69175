"""Agents to start from, each trained by `python -m examples.NAME`; see README.md."""
