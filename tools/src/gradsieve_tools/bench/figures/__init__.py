"""The papers' figures from one's own runs."""
