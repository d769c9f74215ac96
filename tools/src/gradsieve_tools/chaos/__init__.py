"""A training that goes on through faults of every kind, on real ranks, from a seed.

    kinds.py     what can happen, what must come of it, and how it is done
    schedule.py  which of it happens when: data, from a seed
    writes.py    operations on files, in each of which something can happen
    ground.py    where ranks run: the loopback, or a lab's hosts; its links, disks and processors
    fleet.py     ranks from a fork server that has torch loaded, watched to their end
    rank.py      a rank's program: from the last checkpoint a few steps on, and saved again
    verdicts.py  what every rank must have done, said and kept; figures over many faults
    campaign.py  fault after fault on one training a scheme, each from the checkpoint the last one left

`gradsieve_tools/commands/lab.py` has the command.
"""
