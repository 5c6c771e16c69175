"""An agent that uses a tool: its task, a tiny model for it, settings for `VERL` and a report."""
