"""How a method is found by its name: a class of this package, or a class or function of the user's own."""

from __future__ import annotations

import difflib
import importlib
import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, ClassVar, TypeVar

from pydantic import BeforeValidator, create_model

from megatron_rl.section import Section

M = TypeVar("M", bound="Method")


class Method(Section):
    """One method. Fields are its options in the configuration; class variables are the facts about it.

    A *kind* of method (a policy loss, an estimator) is a direct subclass. It names the setting and says how a plain
    function becomes a method of its kind.
    """

    name: str
    """The method's name, or `package.module:Name` of one's own."""

    setting: ClassVar[str]
    """Where a configuration chooses it, for instance `algorithm.policy`."""
    default: ClassVar[str | None] = None
    """The method where options are given and no name."""
    table: ClassVar[dict[str, type[Method]]]
    """Name → class, of the kind."""
    function: ClassVar[Callable[..., Any] | None] = None
    """The user's function, where the method was made of one."""

    @classmethod
    def from_function(cls, function: Callable[..., Any]) -> type[Method]:
        """A class of this kind that calls `function`; its keyword-only parameters are the options."""
        raise ValueError(f"{cls.setting} takes a class, not a function")

    def __reduce__(self) -> Any:
        # Classes made of functions are not found by pickle; their name leads back to the function.
        if self.function is None:
            return super().__reduce__()
        return method_of, (self.setting, self.model_dump())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Method) and self.model_dump() == other.model_dump()

    __hash__ = None  # type: ignore[assignment]


KINDS: dict[str, type[Method]] = {}
"""Setting → kind."""


def kind(cls: type[M]) -> type[M]:
    """Decorator of a kind of method: gives it a table, and its setting a kind."""
    cls.table = {}
    KINDS[cls.setting] = cls
    return cls


def register(cls: type[M]) -> type[M]:
    """Decorator of a method: puts it into its kind's table under the default of its field `name`."""
    cls.table[cls.model_fields["name"].default] = cls
    return cls


def method_of(setting: str, given: Any) -> Method:
    """The method that a configuration names.

    Args:
        setting: one of `KINDS`.
        given: a method, its name, or a mapping with `name` and options.

    Raises:
        ValueError: no such method; says which there are, or what kept it from being imported.
        pydantic.ValidationError: unknown option, or a value that the option does not take.
    """
    of_kind = KINDS[setting]
    if isinstance(given, of_kind):
        return given
    options = {"name": given} if isinstance(given, str) else given
    if isinstance(options, Mapping):
        options = {"name": of_kind.default, **options}
        if isinstance(options["name"], str):
            return class_of(of_kind, options["name"]).model_validate(options)
    raise ValueError(f"{setting} needs a name: one of {', '.join(of_kind.table)}, or package.module:Name")


def chosen(of_kind: type[Method]) -> BeforeValidator:
    """Annotation of a field of the configuration that holds a method of this kind."""
    return BeforeValidator(partial(method_of, of_kind.setting))


def class_of(of_kind: type[M], name: str) -> type[M]:
    """The class of this kind with this name. Raises ValueError as `method_of` does."""
    if name in of_kind.table:
        return of_kind.table[name]  # type: ignore[return-value]
    if ":" not in name:
        close = difflib.get_close_matches(name, of_kind.table, n=1)
        hint = f"'{close[0]}'?" if close else f"one of {', '.join(of_kind.table)}, or package.module:Name"
        raise ValueError(f"{of_kind.setting}: there is no '{name}'; did you mean {hint}")
    module, _, attribute = name.partition(":")
    try:
        found = getattr(importlib.import_module(module), attribute)
    except Exception as error:
        raise ValueError(f"{of_kind.setting}: '{name}' cannot be imported: {type(error).__name__}: {error}") from error
    if isinstance(found, type) and issubclass(found, of_kind):
        return found
    if inspect.isfunction(found):
        return of_kind.from_function(found)  # type: ignore[return-value]
    raise ValueError(f"{of_kind.setting}: '{name}' is neither a function nor a subclass of {of_kind.__name__}")


def class_from_function(base: type[M], function: Callable[..., Any], **members: Any) -> type[M]:
    """A subclass of `base` whose fields are the function's keyword-only parameters, with their types and defaults."""
    fields: dict[str, Any] = {}
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind is parameter.KEYWORD_ONLY:
            annotation = parameter.annotation
            if isinstance(annotation, str):
                annotation = eval(annotation, function.__globals__)
            empty = parameter.empty
            default = ... if parameter.default is empty else parameter.default
            fields[parameter.name] = (Any if annotation is empty else annotation, default)
    made = create_model(function.__name__, __base__=base, __doc__=function.__doc__, **fields)
    made.function = staticmethod(function)  # type: ignore[assignment]
    for name, member in members.items():
        setattr(made, name, member)
    return made


def options_of(method: Method) -> dict[str, Any]:
    """Its options, without the name."""
    return {name: getattr(method, name) for name in type(method).model_fields if name != "name"}
