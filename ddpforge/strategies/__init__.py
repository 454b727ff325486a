"""Strategies: one process, DDP, FSDP2 and DeepSpeed."""
