"""`megatron-rl`: thin commands over the package."""

from megatron_rl.cli.app import main

__all__ = ["main"]
