"""The training loop, what it is put together from, and what is looked at before its first step."""
