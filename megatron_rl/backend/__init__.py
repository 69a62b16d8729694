"""The only room that imports Megatron: model, parallelism, forward and backward, optimizer, anchor, checkpoint."""
