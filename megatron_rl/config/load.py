"""YAML and dotted overrides to a RunConfig; errors name the key."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import ValidationError

from megatron_rl.config.run import RunConfig
from megatron_rl.errors import ConfigError


def load_config(path: str | Path | None = None, overrides: list[str] | tuple[str, ...] = ()) -> RunConfig:
    """Read a YAML file and dotted overrides into a RunConfig.

    Args:
        path: YAML file, or None for defaults only.
        overrides: ``key.sub=value`` strings, applied last.

    Raises:
        ConfigError: unreadable file, unknown key, or value of a wrong type; names the key, what was found and expected.
    """
    try:
        base = OmegaConf.load(path) if path is not None else OmegaConf.create({})
        merged = OmegaConf.merge(base, OmegaConf.from_dotlist(list(overrides)))
        plain = OmegaConf.to_container(merged, resolve=True)
    except (OSError, OmegaConfBaseException, ValueError) as error:
        raise ConfigError("the configuration cannot be read", file=path, found=error) from error
    return parse_config(plain, file=path)


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
