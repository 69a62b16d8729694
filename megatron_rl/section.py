"""What all sections of the configuration have in common: frozen, unknown keys refused, values taken as written."""

from __future__ import annotations

import functools
import types
import typing
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationInfo, field_validator
from pydantic_core import PydanticCustomError

_WORDS = {int: "a whole number", float: "a number", bool: "true or false"}


class Section(BaseModel):
    """A part of the configuration. Docstrings of fields are their descriptions; no number is NaN or infinite."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _as_written(cls, value: Any, info: ValidationInfo) -> Any:
        """Text is no number, a switch is no number, 1.0 is no whole number: pydantic would convert them."""
        wanted = _wanted(cls, str(info.field_name))
        kind = type(value)
        if kind is int and abs(value) >= 2**63:
            raise PydanticCustomError("as_written", "a whole number of at most 63 bits")
        if kind not in (str, bool, int, float) or kind in wanted or not wanted & _WORDS.keys():
            return value
        if kind is int and float in wanted:
            return value
        raise PydanticCustomError("as_written", " or ".join(_WORDS[t] for t in _WORDS if t in wanted))


@functools.cache
def _wanted(section: type[Section], field: str) -> frozenset[type]:
    return scalar_types(section.model_fields[field].annotation)


def scalar_types(annotation: Any) -> frozenset[type]:
    """The plain types that an annotation admits, of str, int, float, bool and None; of containers nothing."""
    if annotation in (str, int, float, bool):
        return frozenset({annotation})
    if annotation is None or annotation is type(None):
        return frozenset({type(None)})
    origin = typing.get_origin(annotation)
    if origin is typing.Literal:
        return frozenset(type(value) for value in typing.get_args(annotation))
    if origin in (typing.Union, types.UnionType):
        return frozenset().union(*(scalar_types(member) for member in typing.get_args(annotation)))
    if origin is typing.Annotated:
        return scalar_types(typing.get_args(annotation)[0])
    return frozenset()
