"""YAML and dotted overrides to a RunConfig; errors name the key."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import ValidationError

from megatron_rl.config.run import RunConfig
from megatron_rl.errors import ConfigError


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
            merged = OmegaConf.merge(merged, OmegaConf.load(file))
    last = files[-1] if files else None
    with _readable(last):
        merged = OmegaConf.merge(merged, OmegaConf.from_dotlist([e for e in overrides if not _is_file(e)]))
        plain = OmegaConf.to_container(merged, resolve=True)
    return parse_config(plain, file=last if len(files) < 2 else " + ".join(map(str, files)))


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
    try:
        return RunConfig.model_validate(plain)
    except ValidationError as error:
        raise _config_error(error, file) from error


def _config_error(error: ValidationError, file: str | Path | None) -> ConfigError:
    first = error.errors()[0]
    key = ".".join(str(part) for part in first["loc"])
    if first["type"] == "extra_forbidden":
        return ConfigError(
            f"unknown configuration key '{key}'", file=file, field=key, expected=_nearest(first["loc"]), setting=key
        )
    if first["type"] == "value_error":
        return ConfigError(first["msg"].removeprefix("Value error, "), file=file, field=key or None)
    return ConfigError(
        f"bad value of '{key}'", file=file, field=key, found=repr(first["input"]), expected=first["msg"], setting=key
    )


def _nearest(location: tuple) -> str:
    import difflib

    section: Any = RunConfig
    for part in location[:-1]:
        section = section.model_fields[part].annotation
    names = list(section.model_fields)
    close = difflib.get_close_matches(str(location[-1]), names, n=1)
    return f"'{close[0]}'" if close else "one of " + ", ".join(names)
