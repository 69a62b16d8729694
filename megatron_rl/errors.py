"""Every error a user can meet, each saying what is wrong, where, what was found, what was expected and which setting
to change."""

from __future__ import annotations

from typing import Any


class MegatronRLError(Exception):
    """Base of all errors raised on purpose.

    The message is assembled from the parts that are known, in one order everywhere::

        <what> [file=…, row=…, field=…]: found …, expected …. Change: <setting>

    Args:
        what: one sentence fragment naming the fault.
        file, row, field: where it was seen (row is a 0-based row of the file or batch).
        found, expected: the two sides of the disagreement.
        setting: the configuration key or command-line option that would change the outcome.
    """

    def __init__(
        self,
        what: str,
        *,
        file: object = None,
        row: int | None = None,
        field: str | None = None,
        found: Any = None,
        expected: Any = None,
        setting: str | None = None,
    ) -> None:
        self.what, self.file, self.row, self.field = what, file, row, field
        self.found, self.expected, self.setting = found, expected, setting
        super().__init__(self._message())

    def _message(self) -> str:
        where = ", ".join(
            f"{name}={value}"
            for name, value in (("file", self.file), ("row", self.row), ("field", self.field))
            if value is not None
        )
        seen = ", ".join(
            f"{name} {value}"
            for name, value in (("found", self.found), ("expected", self.expected))
            if value is not None
        )
        text = self.what + (f" [{where}]" if where else "") + (f": {seen}" if seen else "")
        return text + (f". Change: {self.setting}" if self.setting else "")

    def __reduce__(self):
        parts = {k: getattr(self, k) for k in ("file", "row", "field", "found", "expected", "setting")}
        return _rebuild, (type(self), self.what, parts)


def _rebuild(cls: type, what: str, parts: dict[str, Any]) -> MegatronRLError:
    return cls(what, **parts)


class ConfigError(MegatronRLError):
    """The run configuration contradicts itself, the model, or the machine."""


class RolloutError(MegatronRLError):
    """A recorded rollout is unreadable or inconsistent."""


class RouteError(RolloutError):
    """Recorded expert routes do not fit the model, or were not consumed as expected."""


class LearningError(MegatronRLError):
    """A run goes on without learning: its episodes fail, or its optimizer steps change nothing."""


class CheckpointError(MegatronRLError):
    """A checkpoint (Megatron or HF) is incomplete, corrupt, or of another model."""


class LaunchError(MegatronRLError):
    """Ranks could not be started or cannot find each other."""


class EngineError(MegatronRLError):
    """An inference engine did not answer, or answered something that must not be recorded."""

    retriable = False
    """Whether the same call may succeed later or elsewhere. Repeating a call never records two results."""


class EngineUnavailableError(EngineError):
    """No answer: a server error, a time-out, a dropped connection, or no server that holds the wanted weights."""

    retriable = True


class EngineAnswerError(EngineError):
    """An answer without routes, with too few of them, with log-probs that are no numbers, or of another shape."""


class EngineVersionError(EngineError):
    """An engine holds, or sampled with, other weights than it should."""
