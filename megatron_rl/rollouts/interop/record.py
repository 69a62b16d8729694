"""One record of a peer's dump: typed access to its fields, and errors that say where a fault lies."""

from __future__ import annotations

import base64
import binascii
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from megatron_rl.errors import RolloutError, RouteError
from megatron_rl.rollouts.routes import from_engine
from megatron_rl.rollouts.schema import RolloutHeader

_NPY = b"\x93NUMPY"


@dataclass(frozen=True)
class ImportOptions:
    """What dumps do not say about themselves."""

    header: RolloutHeader
    """Model and sampling the dump was made with."""
    num_layers: int
    """Decoder layers of the model: some engines report routes for every one of them, dense ones included."""
    version: int | None = None
    """Weight version of all tokens; None: as the dump says."""
    reward_key: str | None = None
    """Which of several named rewards to take."""
    missing_reward: float | None = None
    """Reward of a record that has none; None: such a record is an error."""


@dataclass(frozen=True)
class Line:
    """A JSON object at a place of a dump."""

    where: str
    """`file:line`, lines counted from 1."""
    values: Mapping[str, Any]
    path: str = ""
    """How errors name the object: a prefix of field names, for instance ``choices[0].``."""

    def fault(
        self, what: str, name: str, found: Any, expected: Any, setting: str | None = None, kind=RolloutError
    ) -> RolloutError:
        """An error about one field of this object."""
        shown = "null" if found is None else str(found)
        shown = shown if len(shown) < 200 else f"{shown[:200]}…"
        return kind(what, file=self.where, field=self.path + name, found=shown, expected=expected, setting=setting)

    @property
    def name(self) -> str:
        """Names the object where nothing else does: file without ending, line, place in the line."""
        file, _, number = self.where.rpartition(":")
        return ":".join(part for part in (Path(file).stem, number, self.path.rstrip(".")) if part)

    def get(self, name: str) -> Any:
        """A field; None where absent or null."""
        return self.values.get(name)

    def object(self, name: str) -> Line:
        """A field that is an object."""
        value = self.get(name)
        if not isinstance(value, Mapping):
            raise self.fault("field is missing or no object", name, value, "an object")
        return replace(self, values=value, path=f"{self.path}{name}.")

    def metadata(self) -> dict[str, Any]:
        """The field `metadata`, empty if absent."""
        return {} if self.get("metadata") is None else dict(self.object("metadata").values)

    def integer(self, name: str) -> int:
        """A field that is a whole number."""
        value = self.get(name)
        if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
            raise self.fault("field is missing or no whole number", name, value, "a whole number")
        return int(value)

    def integers(self, name: str, dtype: type = np.int32, length: int | None = None) -> np.ndarray:
        """A field that is a list of whole numbers, `dtype` `[length]`."""
        array = self._list(name, "iu", "whole numbers", length)
        limits = np.iinfo(dtype)
        if array.size and (array.min() < limits.min or array.max() > limits.max):
            raise self.fault("number out of range", name, (array.min(), array.max()), f"{limits.min}..{limits.max}")
        return array.astype(dtype)

    def flags(self, name: str, length: int) -> np.ndarray:
        """A field that is a list of 0 and 1, or false and true: bool `[length]`."""
        array = self._list(name, "iub", "0 or 1", length)
        if not np.isin(array, (0, 1)).all():
            raise self.fault("field is no mask", name, array[~np.isin(array, (0, 1))][0], "0 or 1")
        return array.astype(bool)

    def floats(self, name: str, length: int | None = None) -> np.ndarray:
        """A field that is a list of numbers: float32 `[length]`."""
        return self._list(name, "iuf", "numbers", length).astype(np.float32)

    def _list(self, name: str, kinds: str, what: str, length: int | None) -> np.ndarray:
        value = self.get(name)
        if not isinstance(value, (Sequence, np.ndarray)) or isinstance(value, str):
            raise self.fault("field is missing or no list", name, value, f"a list of {what}")
        try:
            array = np.asarray(value)
        except ValueError:  # ragged
            array = np.asarray(None)
        if len(value) and (array.ndim != 1 or array.dtype.kind not in kinds):
            raise self.fault(f"not a flat list of {what}", name, _first_odd(value), what)
        if length is not None and len(value) != length:
            raise self.fault("wrong length", name, len(value), length)
        return array if len(value) else np.empty(0, np.int64)

    def routes(self, name: str, options: ImportOptions, rows: int) -> np.ndarray | None:
        """A field that holds routes as an engine reports them, as recorded: `[L, rows, k]`; None if absent."""
        reported = self.reported_routes(name, options, rows)
        return None if reported is None else self.recorded_routes(name, reported, options, rows)

    def recorded_routes(self, name: str, reported: np.ndarray, options: ImportOptions, rows: int) -> np.ndarray:
        """Routes `[R, layers, k]` as reported, as `[L, rows, k]`: see `routes.from_engine`."""
        model = options.header.fingerprint
        if reported.ndim != 3 or reported.shape[2] != model.topk or reported.dtype.kind not in "iu":
            found = f"{reported.dtype}{list(reported.shape)}"
            raise self.fault("routes do not fit the model", name, found, f"integer [tokens, layers, {model.topk}]",
                             kind=RouteError)  # fmt: skip
        try:
            return from_engine(
                reported, num_layers=options.num_layers, moe_layers=model.moe_layers,
                num_experts=model.num_experts, rows=rows,
            )  # fmt: skip
        except RouteError as error:
            place = "" if error.row is None else f" at token {error.row}"
            raise self.fault(error.what, name, f"{error.found}{place}", error.expected, kind=RouteError) from error

    def reported_routes(self, name: str, options: ImportOptions, rows: int) -> np.ndarray | None:
        """Routes in any form dumps have them: base64 of `np.save` or of raw int32, an object with `data` (base64),
        `dtype` and `shape`, or nested lists."""
        value = self.get(name)
        if value is None:
            return None
        if isinstance(value, Mapping):
            return self.object(name)._described_routes()
        if not isinstance(value, str):
            try:
                return np.asarray(value)
            except ValueError as error:
                raise self.fault("routes are ragged", name, error, "equal lengths", kind=RouteError) from error
        raw = self._base64(name, value)
        if raw.startswith(_NPY):
            try:
                return np.load(io.BytesIO(raw), allow_pickle=False)
            except (ValueError, OSError, EOFError) as error:
                raise self.fault(
                    "routes are no whole npy file", name, error, "np.save output", kind=RouteError
                ) from error
        return self._raw_routes(name, raw, options, rows)

    def _described_routes(self) -> np.ndarray:
        data = self.get("data")
        raw = self._base64("data", data if isinstance(data, str) else "")
        try:
            return np.frombuffer(raw, np.dtype(self.get("dtype"))).reshape(self.get("shape"))
        except (ValueError, TypeError) as error:
            found = f"{len(raw)} bytes, {self.get('dtype')}, {self.get('shape')}: {error}"
            raise self.fault("routes do not fit their shape", "shape", found, "dtype and shape of the data",
                             kind=RouteError) from error  # fmt: skip

    def _raw_routes(self, name: str, raw: bytes, options: ImportOptions, rows: int) -> np.ndarray:
        model = options.header.fingerprint
        layers = sorted({len(model.moe_layers), options.num_layers})
        row = 4 * rows * model.topk
        if not raw or row == 0 or len(raw) % row:
            expected = f"int32 [{rows} tokens, {' or '.join(map(str, layers))} layers, {model.topk}]"
            raise self.fault("routes have an impossible size", name, f"{len(raw)} bytes", expected, kind=RouteError)
        return np.frombuffer(raw, "<i4").reshape(rows, -1, model.topk)

    def _base64(self, name: str, text: str) -> bytes:
        try:
            return base64.b64decode(text, validate=True)
        except (binascii.Error, ValueError) as error:
            raise self.fault("routes are no base64", name, error, "base64", kind=RouteError) from error


def encode_routes(routes: np.ndarray) -> str:
    """Recorded routes `[L, N-1, k]` as dumps have them: base64 of `np.save`, token-major `[N-1, L, k]`."""
    stream = io.BytesIO()
    np.save(stream, np.ascontiguousarray(routes.transpose(1, 0, 2)))
    return base64.b64encode(stream.getvalue()).decode("ascii")


def _first_odd(value: Sequence[Any] | np.ndarray) -> str:
    kinds = [type(item).__name__ for item in value]
    common = max(set(kinds), key=kinds.count)
    place = next((i for i, kind in enumerate(kinds) if kind != common), 0)
    return f"{value[place]!r} at {place}"
