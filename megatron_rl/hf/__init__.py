"""HF checkpoints in and out: one table per model family, its inverse derived, every tensor accounted for.

Pure: no Megatron, no process groups. The backend walks its live model and gathers shards; this room says which bytes
belong where.

Entrances:

* `config.read_hf_config`, `reader.SafetensorsReader`: what a checkpoint directory holds.
* `names.parse_parameter_name`: a live model's parameter name → canonical name.
* `importer.load_shard`: the shard of one rank, read from just the slices it needs.
* `exporter.join_shards`, `exporter.split_full`: the way back.
* `writer.StreamingWriter`, `audit.audit_checkpoint`: nothing missing, doubled, misshapen or non-finite.
"""
