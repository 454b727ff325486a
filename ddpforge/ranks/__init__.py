"""The processes of a run, and how they talk: joining, collectives, what rank 0 does for all."""
