"""Runs, evaluations and predictions of a recipe from beginning to end, and the Python API."""
