"""PPO training of mixture-of-experts language models as multi-turn models, on Megatron-Core."""

__version__ = "0.1.0"
