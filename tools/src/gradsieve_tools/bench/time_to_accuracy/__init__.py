"""Seconds until a model is as good as asked."""
