"""Replicas that die and come back."""
