"""Takes a look at recipes and components without the libraries that compute: names stand in for what is imported.

Importing torch takes longer than all else that a look at a recipe does, and most answers need nothing of it but names:
a base class, an annotation. So ddpforge's own code is looked at with names alone. Whatever does more with one than pass
it on or derive a class from it, and code of anybody else, raises NeedsLibraries; then all that was imported is
forgotten, and the look is taken again with the libraries. So an answer is the same with them and without.

From Python 3.15 on, lazy imports (PEP 810) do most of this.
"""

from __future__ import annotations

import inspect
import sys
import sysconfig
from abc import ABCMeta
from collections.abc import Callable
from functools import cache
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn, TypeVar, Union

from ddpforge.errors import ForgeError

__all__ = ["NeedsLibraries", "look", "need_libraries", "without_libraries"]

T = TypeVar("T")

_IMPORTED = {"annotated_types", "click", "ddpforge", "pydantic", "pydantic_core", "tomlkit", "typing_extensions"}
_IMPORTED |= {"typing_inspection"}  # with the standard library; names stand in for all others
_STANDARD = Path(sysconfig.__file__).parent
_IDLE = ("torch.manual_seed",)  # has no effect by itself: who then draws a number needs torch

# What Python and pydantic ask of any object, and a thing of another library need not have. More than this is never
# wrong, only slower: it needs the libraries.
_OF_MODULES = {"__all__", "__cached__", "__file__", "__path__", "__wrapped__"}
_OF_THINGS = {
    *("__args__", "__class_getitem__", "__get_pydantic_core_schema__", "__get_pydantic_json_schema__"),
    *("__isabstractmethod__", "__metadata__", "__origin__", "__parameters__", "__prepare__"),
    *("__pydantic_serializer__", "__pydantic_validator__", "__set_name__", "__supertype__"),
    *("__typing_is_unpacked_typevartuple__", "__typing_subst__", "__typing_unpacked_tuple_args__", "__wrapped__"),
}
_OF_CLASSES = _OF_THINGS | {
    *("__globals__", "__partialmethod__", "__signature__", "__text_signature__", "_partialmethod"),
}


class NeedsLibraries(BaseException):
    """Names will not do; a BaseException, as nothing is to take it for an error of what is looked at."""


def look(at: Callable[[], T]) -> T:
    """Returns what `at` returns, without importing libraries where that can be had; it may be called twice.

    It must change nothing, and return nothing that holds what it has imported. Its errors for people are the same with
    libraries and without.
    """
    if "torch" not in sys.modules:
        before = dict(sys.modules)
        finder = _Finder()
        sys.meta_path.insert(0, finder)
        try:
            return at()
        except ForgeError:
            raise
        except (NeedsLibraries, Exception):  # what is no error for people had better be seen with the libraries
            pass
        finally:
            sys.meta_path.remove(finder)
            _forget(before)
    return at()


def without_libraries() -> bool:
    """True while names stand in for libraries."""
    return any(isinstance(finder, _Finder) for finder in sys.meta_path)


def need_libraries() -> None:
    """Raises NeedsLibraries while names stand in for them."""
    if without_libraries():
        raise NeedsLibraries


def _forget(before: dict[str, ModuleType]) -> None:
    """Forgets the modules that are names, or may have imported one."""
    for name in [name for name in sys.modules if name not in before]:
        module, (parent, _, child) = sys.modules[name], name.rpartition(".")
        if isinstance(module, _Module) or name.startswith("ddpforge."):
            del sys.modules[name]
            if parent in before and vars(before[parent]).get(child) is module:
                delattr(before[parent], child)


# ---------------------------------------------------------------------------------------------- modules
class _Finder(MetaPathFinder):
    """Finds names in place of installed libraries; where there is none, the error is left to Python."""

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """The spec of a module of names."""
        top = fullname.partition(".")[0]
        if top in _IMPORTED or not (isinstance(sys.modules.get(top), _Module) or self._finds(fullname)):
            return None
        return ModuleSpec(fullname, _Loader(), is_package=True)

    def _finds(self, name: str) -> bool:
        """True if there is a module of that name at the top, and it is none of the standard library."""
        found = PathFinder.find_spec(name) if "." not in name else None
        return found is not None and _STANDARD not in list(Path(found.origin or "").parents)[:2]


class _Loader(Loader):
    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Module(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """There is nothing to run."""


class _Module(ModuleType):
    """A module in which every name is there."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name) if name in _OF_MODULES else NeedsLibraries
        return _named(f"{self.__name__}.{name}")


# ---------------------------------------------------------------------------------------------- names
class _Name:
    """Stands in for what a library has under a name; also for what is made of it where a module is imported."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._class = _Derived(name, (_Base,), {"__doc__": _Unknown()})

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name) if name in _OF_THINGS else NeedsLibraries
        return _named(f"{self._name}.{name}")

    def __mro_entries__(self, bases: tuple[Any, ...]) -> tuple[type]:
        return (self._class,)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._name in _IDLE:
            return None
        _refuse_functions()
        return _Name(f"{self._name}()")

    def __getitem__(self, key: Any) -> Any:
        _refuse_functions()
        return _Name(f"{self._name}[]")

    def __or__(self, other: Any) -> Any:
        _refuse_functions()
        return Union[self, other]  # noqa: UP007

    def __ror__(self, other: Any) -> Any:
        _refuse_functions()
        return Union[other, self]  # noqa: UP007

    def __eq__(self, other: object) -> bool:
        if self is not other and isinstance(other, _Name):
            raise NeedsLibraries  # one thing may have two names
        return self is other

    def __hash__(self) -> int:
        return id(self)

    def __instancecheck__(self, instance: Any) -> bool:
        return self.__subclasscheck__(type(instance))

    def __subclasscheck__(self, subclass: type) -> bool:
        known = subclass is not _Name and (self._class in subclass.__mro__ or _Base not in subclass.__mro__)
        if not known:  # one class of a library may derive from another
            raise NeedsLibraries
        return self._class in subclass.__mro__


_named = cache(_Name)  # `torch.nn` is one thing, as a module that is imported and as an attribute of `torch`


def _refuse_functions() -> None:
    """Raises NeedsLibraries where a function computes, and no module that is imported, nor an annotation of one."""
    if sys._getframe(2).f_code.co_flags & inspect.CO_OPTIMIZED:
        raise NeedsLibraries


def _raise(*_: Any, **__: Any) -> NoReturn:
    raise NeedsLibraries


_BINARY = ("add", "sub", "mul", "matmul", "truediv", "floordiv", "mod", "pow", "lshift", "rshift", "and", "xor")
_OPERATORS = (*_BINARY, *(f"r{name}" for name in _BINARY), "neg", "pos", "abs", "invert", "lt", "le", "gt", "ge")
_PROTOCOLS = (
    *("bool", "int", "float", "index", "str", "repr", "format", "len", "iter", "next", "contains", "setitem"),
    *("delitem", "enter", "exit", "reduce_ex"),
)
for _method in (*_OPERATORS, *_PROTOCOLS):
    setattr(_Name, f"__{_method}__", _raise)


# ---------------------------------------------------------------------------------------------- classes
class _Derived(ABCMeta):
    """The type of classes that derive from a name: of what they inherit, nothing is known."""

    def __getattr__(cls, name: str) -> Any:
        raise AttributeError(name) if name in _OF_CLASSES or name.startswith("_abc_") else NeedsLibraries


class _Unknown:
    """An attribute of which nothing is known."""

    def __get__(self, instance: Any, owner: type | None = None) -> NoReturn:
        raise NeedsLibraries


class _Base(metaclass=_Derived):
    __init__: Any = _Unknown()
    __getattr__: Any = _Unknown()
