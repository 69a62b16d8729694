"""Rollouts in, better weights out: score, update, publish, evaluate, and the loop around them."""
