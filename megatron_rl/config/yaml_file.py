"""YAML as it is written: the core types of YAML 1.2, no second meaning of a word, every fault with its line.

Numbers are decimal (`010`, `0x10`, `1_000` and `1:30` are text), switches are `true` and `false` (`on` and `yes` are
text), nothing is said twice, there is one document, and it is a mapping.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

from megatron_rl.errors import ConfigError

LARGEST = 1 << 20
"""Bytes of a configuration file; a larger one is something else."""
LONGEST_NUMBER = 1000
"""Digits; Python refuses to read much longer ones."""
_INT = re.compile(r"[-+]?(0|[1-9][0-9]*)$")
_FLOAT = re.compile(r"[-+]?((0|[1-9][0-9]*)?\.[0-9]+|(0|[1-9][0-9]*)\.?)([eE][-+]?[0-9]+)?$")
_NULL = re.compile(r"(~|null|Null|NULL|)$")
_BOOL = re.compile(r"(true|True|TRUE|false|False|FALSE)$")


class _Loader(yaml.SafeLoader):
    """PyYAML's safe loader with the types above; aliases are refused, for they can grow without bound."""

    yaml_implicit_resolvers: dict[str, Any] = {}

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.events.AliasEvent):
            raise yaml.MarkedYAMLError(problem="aliases are not read", problem_mark=self.peek_event().start_mark)
        return super().compose_node(parent, index)

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[str, Any]:
        keys: set[str] = set()
        for key, _ in node.value:
            if key.tag != "tag:yaml.org,2002:str":
                raise yaml.MarkedYAMLError(problem="a key that is not text", problem_mark=key.start_mark)
            if key.value in keys:
                raise yaml.MarkedYAMLError(problem=f"'{key.value}' is set twice", problem_mark=key.start_mark)
            keys.add(key.value)
        return super().construct_mapping(node, deep)


def _integer(loader: _Loader, node: Any) -> int:
    return int(loader.construct_scalar(node))


def _number(loader: _Loader, node: Any) -> float:
    return float(loader.construct_scalar(node))


_Loader.add_implicit_resolver("tag:yaml.org,2002:null", _NULL, None)
_Loader.add_implicit_resolver("tag:yaml.org,2002:bool", _BOOL, None)
_Loader.add_implicit_resolver("tag:yaml.org,2002:int", _INT, None)
_Loader.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, None)
_Loader.add_constructor("tag:yaml.org,2002:int", _integer)
_Loader.add_constructor("tag:yaml.org,2002:float", _number)


def read_yaml_file(path: str | Path) -> dict[str, Any]:
    """The mapping in a YAML file; an empty file is an empty one.

    Raises:
        ConfigError: the file is no readable UTF-8 file, or not one YAML mapping; names file, line and what is wrong.
    """
    path = Path(path)
    try:
        if not path.is_file():
            found = "a directory" if path.is_dir() else "no regular file" if path.exists() else "nothing"
            raise ConfigError("the configuration cannot be read", file=path, found=found, expected="a YAML file")
        with path.open("rb") as stream:
            raw = stream.read(LARGEST + 1)
    except OSError as error:
        raise ConfigError("the configuration cannot be read", file=path, found=error) from error
    if len(raw) > LARGEST:
        raise ConfigError("the configuration is too large", file=path, expected=f"at most {LARGEST} bytes")
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError("the configuration is not UTF-8", file=path, found=f"byte {error.start}") from error
    value = parse_yaml(text, file=path)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise ConfigError(
            "the configuration is no mapping", file=path, found=type(value).__name__, expected="key: value"
        )
    return value


def parse_yaml(text: str, *, file: str | Path | None = None, field: str | None = None) -> Any:
    """The value of one YAML document.

    Raises:
        ConfigError: a fault of syntax, a key twice, an alias, a second document; names file or field, and the line.
    """
    try:
        loader = _Loader(text)
        value = loader.get_data() if loader.check_data() else None
        if loader.check_data():
            mark = loader.peek_event().start_mark
            raise yaml.MarkedYAMLError(problem="a second document begins", problem_mark=mark)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = "" if mark is None or file is None else f"line {mark.line + 1}: "
        problem = f"{where}{error.problem or error.context}"
        raise ConfigError("not a YAML configuration", file=file, field=field, found=problem) from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        problem = "too deep" if isinstance(error, RecursionError) else str(error).splitlines()[0]
        raise ConfigError("not a YAML configuration", file=file, field=field, found=problem) from error
    return value


def parse_scalar(text: str) -> Any:
    """null, a switch, a number, or the text itself, exactly as it stands."""
    if _NULL.match(text) and text:
        return None
    if _BOOL.match(text):
        return text.lower() == "true"
    if _INT.match(text) and len(text) < LONGEST_NUMBER:
        return int(text)
    return float(text) if _FLOAT.match(text) else text


class _Dumper(yaml.SafeDumper):
    """Quotes every text that `_Loader`, or an older reader, would take for something else."""


for _tag, _pattern in (("null", _NULL), ("bool", _BOOL), ("int", _INT), ("float", _FLOAT)):
    _Dumper.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", _pattern, None)


def dump_yaml(value: dict[str, Any]) -> str:
    """The mapping as YAML that `parse_yaml` reads back, keys in their order."""
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)
