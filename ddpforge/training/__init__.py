"""The training loop, its parts, and the checks before its first step."""
