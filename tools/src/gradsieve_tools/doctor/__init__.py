"""Is this cluster set up well? Measured on the live group, checked by rules, each finding with its fix.

facts.py     what a rank knows without a message: interfaces, names, threads, versions
meeting.py   ranks send each other facts over torchrun's store, which works where gloo does not
pairs.py     who measures with whom in which round, and what a pair measures
speed.py     what a rank's own processors and memory do
model.py     the user's own model: its size, a step, and whether a sync could be attached to it
evaluate.py  figures in, findings out; no clock, no socket
run.py       all of it in order, on every rank
view.py      tables and the heat map
self_test    not the cluster but the device: two ranks of its own, kernels, trainings, a death
"""
