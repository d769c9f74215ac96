"""A training step on a lab network."""
