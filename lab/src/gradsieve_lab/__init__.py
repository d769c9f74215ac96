"""The workshop of gradsieve: emulated networks, benches, faults, fuzzing and simulation.

Nobody who trains imports it. No version of it promises anything about the next one.
"""

__version__ = "0.1.0"
