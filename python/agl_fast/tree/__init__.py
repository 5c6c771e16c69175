"""Training on prefix trees: attention, token scores, and verl's engines with both."""
