"""Doors from the frameworks people run into the pipeline."""
