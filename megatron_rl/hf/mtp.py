"""Multi-token-prediction layers: decoder layers beyond the model's own, which training neither builds nor changes.

They are dropped on import with a note in the audit. An export leaves them out and sets their number to 0, or, where the
configuration keeps them (`read_hf_config(..., mtp="keep")`), copies them from the source checkpoint as they are.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from megatron_rl.hf.config import HFModelConfig

SETTING = "num_nextn_predict_layers"
_LAYER = re.compile(r"model\.layers\.(\d+)\.")


def mtp_names(config: HFModelConfig, names: Iterable[str]) -> list[str]:
    """Those of a checkpoint's tensor names that belong to its multi-token-prediction layers, sorted."""
    layers = range(config.num_layers, config.num_layers + config.mtp_layers)
    return sorted(name for name in names if (match := _LAYER.match(name)) and int(match[1]) in layers)


def dropped_note(config: HFModelConfig, names: Iterable[str]) -> list[str]:
    """One line on what is not imported, or none."""
    found = mtp_names(config, names)
    layers = f"{config.mtp_layers} multi-token-prediction layer(s) from model.layers.{config.num_layers} on"
    fate = "copied to exports as they are" if config.keep_mtp else "dropped: exports leave them out"
    return [f"{len(found)} tensors of {layers} are not trained, and {fate}"] if found else []
