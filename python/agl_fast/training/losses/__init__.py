"""What is minimised: policy, KL, entropy and value terms. Loaded in every worker that trains."""
