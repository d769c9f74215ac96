"""The command line: parse, call one function, print. `tree.py` has all commands; main.py begins."""
