"""Ops that a scheme asks for, and the engines that carry them between ranks."""
