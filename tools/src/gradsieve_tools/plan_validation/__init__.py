"""Predictions held against a lab."""
