"""Ranks of a run and their communication: joining, collectives, actions of rank 0, failures, logs, leaving."""
