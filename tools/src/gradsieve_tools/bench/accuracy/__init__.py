"""Trainings with every sync: final accuracy and loss."""
