"""Training on rows that are prefix trees: attention, scores of tokens, verl's engine with both."""
