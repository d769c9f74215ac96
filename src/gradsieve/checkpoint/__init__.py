"""Saving and loading: a rank's state, directories of all ranks, sharded ones, other numbers of ranks."""
