"""Faults that happen to real ranks, at a named op of a named step, and what must come of them.

    kinds.py     what can happen to a rank
    injector.py  lets it happen there
    trained.py   the rank's program: a small training that reports how it ended
    fleet.py     ranks from a fork server that has torch loaded, watched to their end
    verdicts.py  what every rank must have done, said and kept; figures over many faults
    matrix.py    each op of a scheme's step x each kind x each rank

The rest of the lab does without torch and the library; this package uses both.
`gradsieve_tools/commands/lab.py` has its command.
"""
