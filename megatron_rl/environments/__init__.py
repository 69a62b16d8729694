"""Worlds and tasks: what is played, in which order, and what its words are as token ids."""
