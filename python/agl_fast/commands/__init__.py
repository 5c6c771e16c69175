"""What `python -m agl_fast` does."""
