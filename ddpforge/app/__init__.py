"""Complete runs, evaluations and predictions of a recipe, and the Python API."""
