"""`python -m megatron_rl.cli`."""

from megatron_rl.cli.app import main

if __name__ == "__main__":
    main()
