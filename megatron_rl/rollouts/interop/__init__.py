"""Rollouts of other stacks: their dumps in, ours out."""
