"""Samplers of training data."""
