"""The sub-commands of `python -m agl_fast`."""
