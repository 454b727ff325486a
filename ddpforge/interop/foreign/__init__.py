"""Checkpoints that other programs wrote, read as what a ddpforge checkpoint is made of: named tensors.

Nothing is believed of such files. safetensors and pickles of bare tensors (`torch.load(weights_only=True)`) are read as
they are; every other pickle can run any code as it is loaded, and is loaded only if the user trusts whoever made it.
"""
