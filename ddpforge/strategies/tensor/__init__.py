"""Tensor parallelism: neighbouring ranks compute shares of the same layers, according to a model's plan."""
