"""Schemes to compare with: dense, and sparse ones of the literature that all-gather."""
