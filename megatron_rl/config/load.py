"""YAML and dotted overrides to a RunConfig; errors name the key."""

from __future__ import annotations

import contextlib
import typing
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import ValidationError

from megatron_rl.config.renamed import new_name_of
from megatron_rl.config.run import RunConfig
from megatron_rl.errors import ConfigError
from megatron_rl.methods import KINDS, class_of
from megatron_rl.section import Section


def load_config(path: str | Path | Sequence[str | Path] | None = None, overrides: Sequence[str] = ()) -> RunConfig:
    """Read YAML files and dotted overrides into a RunConfig. What comes later wins, key by key.

    Args:
        path: YAML file, several (a task, then a recipe), or None for defaults only.
        overrides: ``key.sub=value`` strings, applied last; an entry that names a YAML file is a further file.

    Raises:
        ConfigError: unreadable file, unknown key, or value of a wrong type; names the key, what was found and expected.
    """
    files = [] if path is None else [path] if isinstance(path, (str, Path)) else list(path)
    files += [entry for entry in overrides if _is_file(entry)]
    merged = OmegaConf.create({})
    for file in files:
        with _readable(file):
            merged = _layered(merged, OmegaConf.load(file))
    last = files[-1] if files else None
    with _readable(last):
        dotted = [_with_name(entry) for entry in overrides if not _is_file(entry)]
        merged = _layered(merged, OmegaConf.from_dotlist(dotted))
        plain = OmegaConf.to_container(merged, resolve=True)
    return parse_config(plain, file=last if len(files) < 2 else " + ".join(map(str, files)))


def _layered(base: DictConfig, layer: Any) -> DictConfig:
    """`base` with `layer` over it, key by key. A layer that names another method begins the method's section anew: the
    options of one method mean nothing to the next."""
    for path, kind in KINDS.items():
        given = OmegaConf.select(layer, path)
        if isinstance(given, str):
            OmegaConf.update(layer, path, {"name": given})
            given = OmegaConf.select(layer, path)
        if not isinstance(given, DictConfig) or "name" not in given:
            continue
        before = OmegaConf.select(base, f"{path}.name") or kind.default
        if given.name != before and OmegaConf.select(base, path) is not None:
            section, _, key = path.rpartition(".")
            del OmegaConf.select(base, section)[key]
    merged = OmegaConf.merge(base, layer)
    assert isinstance(merged, DictConfig)
    return merged


def _with_name(entry: str) -> str:
    """`algorithm.policy=gspo` as `algorithm.policy.name=gspo`, so that its options can be overridden beside it."""
    key, separator, value = entry.partition("=")
    plain = separator and key in KINDS and value not in ("", "null") and not value.startswith("{")
    return f"{key}.name={value}" if plain else entry


def _is_file(entry: str) -> bool:
    return "=" not in entry and entry.endswith((".yaml", ".yml"))


@contextlib.contextmanager
def _readable(file: str | Path | None) -> Iterator[None]:
    try:
        yield
    except (OSError, OmegaConfBaseException, ValueError) as error:
        raise ConfigError("the configuration cannot be read", file=file, found=error) from error


def parse_config(plain: Any, file: str | Path | None = None) -> RunConfig:
    """Validate a plain mapping. See `load_config` for errors."""
    _refuse_old_keys(plain, file)
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
        plain = plain.get(part) if isinstance(plain, dict) else None
        kind = KINDS.get(".".join(map(str, location[:depth])))
        if kind is not None:
            name = plain.get("name", kind.default) if isinstance(plain, dict) else plain
            section = class_of(kind, str(name))
        else:
            annotation = section.model_fields[str(part)].annotation
            members = typing.get_args(annotation) or (annotation,)
            section = next(m for m in members if isinstance(m, type) and issubclass(m, Section))
    return section
