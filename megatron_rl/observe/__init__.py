"""What a person sees of a run: metric files, progress, curves, tables of recorded rollouts."""
