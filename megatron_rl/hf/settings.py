"""Typed access to config.json; every refusal names file and setting."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_rl.errors import CheckpointError


@dataclass(frozen=True)
class Settings:
    """The raw JSON of a model configuration.

    Every accessor raises CheckpointError, with `field` naming the setting, where a value is absent or of another type.
    """

    values: dict[str, Any]
    file: Path

    def get(self, key: str) -> Any:
        """The value as it stands, None where absent."""
        return self.values.get(key)

    def size(self, key: str, default: int | None = None) -> int:
        """A positive integer; the default also stands for null."""
        value = self.values.get(key)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise self.fault(key, value, "a positive integer")
        return value

    def count(self, key: str) -> int:
        """An integer ≥ 0; 0 where absent or null."""
        value = self.values.get(key) or 0
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise self.fault(key, value, "an integer of at least 0")
        return value

    def positive(self, key: str, default: float | None = None) -> float:
        """A positive number; the default also stands for null."""
        value = self.values.get(key)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
            raise self.fault(key, value, "a positive number")
        return float(value)

    def flag(self, key: str, default: bool | None = None) -> bool:
        """true or false."""
        value = self.values.get(key, default)
        if not isinstance(value, bool):
            raise self.fault(key, value, "true or false")
        return value

    def only(self, reason: str, **allowed: tuple[Any, ...]) -> None:
        """Refuse settings that hold something else than the values allowed; absent ones pass.

        Args:
            reason: what about them is unsupported.
            allowed: setting → values; the first is shown as the expected one.
        """
        for key, values in allowed.items():
            if key in self.values and self.get(key) not in values:
                raise self.fault(key, self.get(key), f"{values[0]!r}", reason)

    def fault(self, key: str, found: Any, expected: str, what: str = "bad model setting") -> CheckpointError:
        """The error that names a setting."""
        shown = "nothing" if found is None else repr(found)
        return CheckpointError(what, file=self.file, field=key, found=shown, expected=expected)
