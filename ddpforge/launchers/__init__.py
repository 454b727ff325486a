"""Start of a run's processes: command lines of launchers, rendezvous of machines, and exit codes."""
