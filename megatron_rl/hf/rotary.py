"""Rotary embedding settings, from either place where versions of transformers write them."""

from __future__ import annotations

from typing import Any

from megatron_rl.hf.architecture import Rotary
from megatron_rl.hf.settings import Settings

_PLACES = ("rope_scaling", "rope_parameters")
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""What Megatron's implementation holds fixed."""


def read_rotary(raw: Settings, *kinds: str, partial: bool = False) -> dict[str, Any]:
    """Base and shape of the rotary embedding, as fields of `HFModelConfig`.

    The base stands at the top level up to transformers 4 and inside `rope_parameters` from 5 on; it is never defaulted,
    and where it stands twice it must be the same.

    Args:
        raw: the model's settings.
        kinds: kinds of scaling the family allows beside none.
        partial: the family rotates a part of each head, which the configuration must then state.

    Raises:
        CheckpointError: `field` names the setting.
    """
    found = {float(theta) for theta in _everywhere(raw, "rope_theta")}
    if len(found) != 1:
        raise raw.fault("rope_theta", sorted(found) or None, "one value, at the top level or in rope_parameters")
    theta = Settings({"rope_theta": found.pop()}, raw.file).positive("rope_theta")
    fractions = {float(part) for part in _everywhere(raw, "partial_rotary_factor")}
    fraction = fractions.pop() if fractions else None if partial else 1.0
    if fractions or fraction is None or not (0 < fraction <= 1 if partial else fraction == 1):
        shown = fraction if fraction is None or not fractions else sorted({fraction, *fractions})
        expected = "one share of a head between 0 and 1" if partial else "1.0"
        raise raw.fault("partial_rotary_factor", shown, expected, "unsupported model setting")
    return {"rope_theta": theta, "rotary": _scaling(raw, kinds, fraction)}


def _everywhere(raw: Settings, key: str) -> list[Any]:
    found = [raw.get(key), *((raw.get(place) or {}).get(key) for place in _PLACES)]
    return [value for value in found if value is not None]


def _scaling(raw: Settings, kinds: tuple[str, ...], fraction: float) -> Rotary:
    scaled = []
    for place in _PLACES:
        nested = raw.get(place) or {}
        kind = nested.get("rope_type", nested.get("type", "default"))
        if kind not in ("default", *kinds):
            expected = " or ".join(("plain rotary embedding", *kinds))
            raise raw.fault(place, nested, expected, "unsupported rotary scaling")
        if kind != "default":
            scaled.append((place, kind, nested))
    if not scaled:
        return Rotary(fraction)
    place, kind, nested = scaled[-1]
    inner = Settings(nested, raw.file)
    if kind == "llama3":
        for key, value in _LLAMA3.items():
            if nested.get(key) != value:
                raise raw.fault(
                    place, nested, f"{key} {value}, which Megatron holds fixed", "unsupported rotary scaling"
                )
        return Rotary(fraction, "llama3", inner.positive("factor"), 8192)
    return _yarn(raw, place, inner, fraction)


def _yarn(raw: Settings, place: str, inner: Settings, fraction: float) -> Rotary:
    if inner.get("attention_factor") is not None:
        raise raw.fault(place, inner.values, "no attention_factor of its own", "unsupported rotary scaling")
    # transformers takes the two weights together or not at all.
    both = bool(inner.get("mscale") and inner.get("mscale_all_dim"))
    return Rotary(
        fraction,
        "yarn",
        inner.positive("factor"),
        inner.size("original_max_position_embeddings", raw.get("max_position_embeddings")),
        inner.positive("beta_fast", 32.0),
        inner.positive("beta_slow", 1.0),
        inner.positive("mscale") if both else 1.0,
        inner.positive("mscale_all_dim") if both else 0.0,
        inner.flag("truncate", True),
    )
