"""A process beside every rank, which sees it stand still, freeze or die, and says who the others wait for."""
