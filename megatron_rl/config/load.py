"""YAML files and dotted overrides to a RunConfig; every value is taken as written, errors name the key."""

from __future__ import annotations

import typing
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from megatron_rl.config.renamed import new_name_of
from megatron_rl.config.run import RunConfig
from megatron_rl.config.yaml_file import parse_scalar, parse_yaml, read_yaml_file
from megatron_rl.errors import ConfigError
from megatron_rl.methods import KINDS, class_of
from megatron_rl.section import Section, scalar_types


def load_config(path: str | Path | Sequence[str | Path] | None = None, overrides: Sequence[str] = ()) -> RunConfig:
    """Read YAML files and dotted overrides into a RunConfig. What comes later wins, key by key.

    An override's value is text where the setting is text (`output=runs/a #2`), else a decimal number, `true`, `false`
    or `null`, or a list or mapping in YAML's brackets (`algorithm.policy={name: gspo}`).

    Args:
        path: YAML file, several (a task, then a recipe), or None for defaults only.
        overrides: ``key.sub=value`` strings, applied last; an entry that names a YAML file is a further file.

    Raises:
        ConfigError: unreadable file, unknown key, or value of a wrong type; names the key, what was found and expected.
    """
    files = [] if path is None else [path] if isinstance(path, (str, Path)) else list(path)
    files += [entry for entry in overrides if _is_file(entry)]
    merged: dict[str, Any] = {}
    for file in files:
        merged = _layered(merged, read_yaml_file(file))
    for entry in overrides:
        if not _is_file(entry):
            merged = _layered(merged, _override(entry, merged))
    named = files[0] if len(files) == 1 else " + ".join(map(str, files)) or None
    return parse_config(merged, file=named)


def _is_file(entry: str) -> bool:
    return "=" not in entry and entry.endswith((".yaml", ".yml"))


def _layered(base: dict[str, Any], layer: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """`base` with `layer` over it, key by key. A layer that names another method begins the method's section anew: the
    options of one method mean nothing to the next."""
    merged = dict(base)
    for key, value in layer.items():
        path, before = f"{prefix}{key}", base.get(key)
        if path in KINDS:
            before, value = _as_section(before), _as_section(value)
            if isinstance(value, dict) and "name" in value and value["name"] != _name_in(path, before):
                before = None
        if isinstance(before, dict) and isinstance(value, dict):
            value = _layered(before, value, f"{path}.")
        merged[key] = value
    return merged


def _as_section(value: Any) -> Any:
    """A method's name stands for a section with this name."""
    return {"name": value} if isinstance(value, str) else value


def _name_in(path: str, section: Any) -> Any:
    return section.get("name", KINDS[path].default) if isinstance(section, dict) else KINDS[path].default


def _override(entry: str, merged: dict[str, Any]) -> dict[str, Any]:
    """`a.b=text` as `{"a": {"b": value}}`."""
    key, separator, text = entry.partition("=")
    parts = key.split(".")
    if not separator or not all(parts):
        raise ConfigError("not an override", found=repr(entry), expected="key.sub=value, or a file ending in .yaml")
    value = _value_of(parts, text, merged)
    for part in reversed(parts):
        value = {part: value}
    return value


def _value_of(parts: list[str], text: str, merged: dict[str, Any]) -> Any:
    """What the text means for the setting at `parts`: text where that takes text, else what YAML would read."""
    if text[:1] in ("[", "{", '"', "'"):
        return parse_yaml(text, field=".".join(parts))
    scalar = parse_scalar(text)
    wanted = _scalars_at(parts, merged)
    if str in wanted and not isinstance(scalar, str) and not (scalar is None and type(None) in wanted):
        return text
    return scalar


def _scalars_at(parts: list[str], merged: dict[str, Any]) -> frozenset[type]:
    """Plain types that the setting at `parts` takes; none where there is no such setting."""
    try:
        section = _section_at(tuple(parts[:-1]), merged)
        field = section.model_fields.get(parts[-1])
    except (KeyError, StopIteration, ValueError):
        return frozenset()
    return scalar_types(field.annotation) if field else frozenset()


def parse_config(plain: Any, file: str | Path | None = None) -> RunConfig:
    """Validate a plain mapping. See `load_config` for errors."""
    _refuse_old_keys(plain, file)
    _refuse_interpolations(plain, file)
    try:
        return RunConfig.model_validate(plain)
    except ValidationError as error:
        raise _config_error(error, plain, file) from error


def _refuse_old_keys(plain: Any, file: str | Path | None, prefix: str = "") -> None:
    for key, value in plain.items() if isinstance(plain, dict) else ():
        path = f"{prefix}{key}"
        if new := new_name_of(path, value):
            raise ConfigError(
                f"'{path}' has another name now", file=file, field=path, found=value, expected=new, setting=new
            )
        _refuse_old_keys(value, file, f"{path}.")


def _refuse_interpolations(plain: Any, file: str | Path | None, key: str = "") -> None:
    """`${…}` of other readers would go on as text."""
    if isinstance(plain, str) and "${" in plain:
        raise ConfigError("'${…}' is not replaced here", file=file, field=key, found=plain, expected="the value itself")
    items = plain.items() if isinstance(plain, dict) else enumerate(plain) if isinstance(plain, (list, tuple)) else ()
    for name, value in items:
        _refuse_interpolations(value, file, f"{key}.{name}".lstrip("."))


def _config_error(error: ValidationError, plain: Any, file: str | Path | None) -> ConfigError:
    # A key that is misspelt leaves the right one missing: the first is what to tell.
    first = min(error.errors(), key=lambda fault: fault["type"] != "extra_forbidden")
    key = ".".join(str(part) for part in first["loc"])
    if first["type"] == "extra_forbidden":
        expected = _nearest(first["loc"], plain)
        return ConfigError(f"unknown configuration key '{key}'", file=file, field=key, expected=expected, setting=key)
    if first["type"] == "value_error":
        return ConfigError(first["msg"].removeprefix("Value error, "), file=file, field=key or None)
    if first["type"] == "missing":
        return ConfigError(f"'{key}' has no default", file=file, field=key, expected="a value", setting=key)
    return ConfigError(
        f"bad value of '{key}'", file=file, field=key, found=repr(first["input"]), expected=first["msg"], setting=key
    )


def _nearest(location: tuple[int | str, ...], plain: Any) -> str:
    import difflib

    names = list(_section_at(location[:-1], plain).model_fields)
    close = difflib.get_close_matches(str(location[-1]), names, n=1)
    return f"'{close[0]}'" if close else "one of " + ", ".join(names)


def _section_at(location: tuple[int | str, ...], plain: Any) -> type[Section]:
    """The section at a location: by its name where that decides, else by the annotation of its field."""
    section: type[Section] = RunConfig
    for depth, part in enumerate(location, 1):
        plain = plain.get(str(part)) if isinstance(plain, dict) else None
        kind = KINDS.get(".".join(map(str, location[:depth])))
        if kind is not None:
            name = plain.get("name", kind.default) if isinstance(plain, dict) else plain
            section = class_of(kind, str(name))
        else:
            annotation = section.model_fields[str(part)].annotation
            members = typing.get_args(annotation) or (annotation,)
            section = next(m for m in members if isinstance(m, type) and issubclass(m, Section))
    return section
