"""Checks for conditions that break a run or make it slow: on this machine, and between the ranks of a launcher."""
