"""`python -m megatron_rl`: the same commands as `megatron-rl`."""

from megatron_rl.cli.app import main

if __name__ == "__main__":
    main()
