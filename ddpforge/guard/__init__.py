"""Checks of a run, which the kernel reaches by the entry-point group `ddpforge.check` alone; see `training.checks`."""
