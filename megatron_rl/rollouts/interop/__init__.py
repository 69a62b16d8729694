"""Import of rollouts that other stacks dumped, and export into their formats."""
