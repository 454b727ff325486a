"""Tensor parallelism: neighbouring ranks compute shares of the same layers, as a model's plan says."""
