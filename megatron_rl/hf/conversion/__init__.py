"""Whole checkpoints to HF directories: planned, streamed, shared by processes, resumed, sealed, verified.

    sources.py       where values come from: an HF checkpoint (a run's checkpoint: training/checkpoint_source.py)
    output_files.py  which parameter goes into which file, at which byte, before anything is read
    shards.py        one safetensors file: written as a stream, read back
    manifest.py      hashes of every tensor and file
    conversion.py    conversion: finished files are kept, the directory appears when all are there
    verify.py        the written directory against its manifest and its source, bit for bit

Processes share no memory and exchange no messages: a plan follows from source and options alone, process r of w writes
every w-th file, and the first one waits for the others' files and publishes. So one process, torchrun, srun and mpirun
behave the same, and a killed conversion continues under any number of processes.
"""
