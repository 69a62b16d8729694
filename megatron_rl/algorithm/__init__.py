"""Configuration × objectives, on tensors: which advantage, which loss, which correction a run's settings mean.

No model, no process group, no Megatron: what comes in are vectors over a batch's decisions, and so is what goes out.
"""
