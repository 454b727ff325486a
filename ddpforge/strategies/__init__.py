"""Data-parallel and single-process strategies."""
