"""Starting ranks: from torchrun, SLURM or a single process."""
