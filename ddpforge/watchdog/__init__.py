"""Watchdogs: a process per rank that detects if the rank hangs, freezes or dies, and reports the rank at fault."""
