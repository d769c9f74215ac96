"""What is used next to a training: doctor, plan, watch and report; and the workshop: emulated networks,
benches, faults, fuzzing and simulation. No training imports it."""

__version__ = "0.1.0"
