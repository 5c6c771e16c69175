"""`python -m agl_fast.quickstart`: an agent that uses a tool learns how, trained by `VERL`."""
