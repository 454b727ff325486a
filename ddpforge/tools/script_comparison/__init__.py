"""Compares a user's own training script with a recipe, step by step: `ddpforge compare-script`."""
