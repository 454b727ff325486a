"""Starting the processes of a run: command lines of launchers, and what became of them."""
