"""Package description for pip. `make setup` does not use it: it installs requirements/lock-py311.txt instead."""

from setuptools import find_packages, setup

RUNTIME = [
    "torch",
    "megatron-core>=0.16.1",
    "transformers",
    "safetensors",
    "pyarrow",
    "pydantic",
    "pyyaml",
    "typer",
    "rich",
    "tensorboard",
    "psutil",
    "gymnasium",
    "httpx2",
    "xxhash",
    "matplotlib",
    "numpy",
]

# NVIDIA Apex is used when present, but must not be listed: the project called "apex" on PyPI is unrelated.
EXTRAS = {
    "gpu": ["transformer-engine[pytorch]"],
    "vllm": ["vllm"],
    "mpi": ["mpi4py"],
    "dev": ["pytest", "pytest-timeout", "hypothesis", "mypy", "pre-commit", "ruff"],
}

setup(
    name="megatron_rl",
    version="0.1.0",
    description="PPO training of mixture-of-experts language models as multi-turn models, on Megatron-Core",
    license="Apache-2.0",
    python_requires=">=3.10",
    packages=find_packages(include=["megatron_rl", "megatron_rl.*"]),
    package_data={"megatron_rl": ["py.typed"]},
    install_requires=RUNTIME,
    extras_require=EXTRAS,
    entry_points={"console_scripts": ["megatron-rl = megatron_rl.cli:main"]},
)
