"""Hostile bytes by the million: real messages, altered, wherever a peer's bytes come in."""
