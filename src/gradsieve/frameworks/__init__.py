"""Adapters for Accelerate, Lightning, Transformers' Trainer and torchft."""
