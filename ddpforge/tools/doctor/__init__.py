"""Looks at what a run would trip over: on this machine, and between the ranks that a launcher has started."""
