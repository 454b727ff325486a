"""Who the processes of a run are, and how they talk: joining, collectives, what rank 0 does for all."""
