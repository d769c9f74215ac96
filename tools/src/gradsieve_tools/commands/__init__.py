"""The commands: `table.py` declares them, `bench.py`, `lab.py` and `simulate.py` have their calls."""
