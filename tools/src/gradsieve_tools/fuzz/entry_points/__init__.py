"""Every place where gradsieve reads bytes that a peer or a file decides, with honest bytes to alter.

A fuzzer gives each `EntryPoint` altered bytes: it must refuse them or read something that can be, and must
not take more memory than the bytes are long. `gradsieve lab fuzz` does so a million times.
"""

from gradsieve_tools.fuzz.entry_points import exchanges, files, pipelines, readers
from gradsieve_tools.fuzz.entry_points.entry_point import REFUSED, EntryPoint

__all__ = ["REFUSED", "EntryPoint", "exchanges", "files", "pipelines", "readers"]
