"""Does gradsieve work on this device? What an owner of GPUs runs before trusting it, on one machine.

pair.py       two ranks as processes of their own, started anew after a failure
rank.py       such a process: it does what it is asked, in a process group that is made for it
kernels.py    kernels against the reference, and their share of the memory's bandwidth
trainings.py  short trainings of both ranks: against the CPU, for long, with a death, beside batch norm
evaluate.py   answers in, findings out
run.py        all checks in order
view.py       the table, and the file for an issue

Nothing of the device is touched outside of the two processes: what crashes one of them is a finding.
"""
