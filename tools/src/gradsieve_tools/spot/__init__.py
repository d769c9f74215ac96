"""Spot nodes: trainings under real agents of torchrun, whose workers and agents are killed and replaced."""
