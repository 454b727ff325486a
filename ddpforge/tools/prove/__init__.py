"""Relations that a correct training script keeps, tried on scripts of any trainer: `ddpforge prove`."""
