"""Sharded inside hosts, sparse between them."""
