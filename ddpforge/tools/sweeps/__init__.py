"""Sweeps: runs of one recipe with different values, their training and their results."""
