"""Reads checkpoints of other programs into named tensors, the contents of a ddpforge checkpoint.

These files are not trusted. safetensors and pickles of bare tensors (`torch.load(weights_only=True)`) are safe to read.
Any other pickle can run code while it is loaded, so it is loaded only if the user trusts its author.
"""
