"""Fakes, input builders, and the scripts that tests run in processes of their own."""
