"""A long training on real ranks, and what it takes of the machine from its beginning to its end.

    rank.py    a rank's program: a small training that uses everything, and looks at itself
    verdicts.py whether something grows

`gradsieve_tools/commands/lab.py` has the command.
"""
