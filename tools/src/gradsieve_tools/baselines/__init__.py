"""Schemes that few compare with, registered by entry points of this distribution."""
