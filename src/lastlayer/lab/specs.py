"""Specs of heads, such as ``adaptive:cutoffs=2000,10000``: a name and constructor arguments.

The name is that of a registered head (:func:`lastlayer.heads.registered`), or of a user's class as
``mymodule:MyHead``, with arguments after another colon. Arguments that depend on the data are
filled in.
"""

import difflib
import importlib
import inspect
import os
import re
import sys
import types
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, Union, get_args, get_origin

from torch.nn import Module

from lastlayer.heads import Head
from lastlayer.heads.recipes import ClassData, Recipe, registered
from lastlayer.lab.errors import SpecError
from lastlayer.lab.models import InfoNCE

# Arguments that the lab sets for all heads, or takes from the data.
_DECIDED = frozenset(
    {
        "in_features", "n_classes", "counts", "spellings", "class_weight", "ignore_index",
        "reduction", "device", "dtype", "seed", "per_rank", "loss_options", "calibrator",
    }
)  # fmt: skip
# Tasks with one class per row.
_ONE_CLASS = ("lm", "classification")
_ALIASES = {"softmax": "full", "linear": "full", "cross_entropy": "full"}


@dataclass(frozen=True)
class Family:
    """A recipe, the class of its head, and the tasks that it suits."""

    cls: type[Any]
    recipe: Recipe
    tasks: tuple[str, ...]

    @property
    def name(self) -> str:
        return self.recipe.name


def catalogue() -> dict[str, Family]:
    """All families of heads that the lab can compare, by name."""
    return {
        name: Family(cls, recipe, _ONE_CLASS if recipe.task == "lm" else (recipe.task,))
        for name, (cls, recipe) in [*registered().items(), ("info_nce", (InfoNCE, InfoNCE.recipe))]
    }


def defaults_for(task: str) -> list[str]:
    """The default specs: one or more of every family that suits the task."""
    families = [each for each in catalogue().values() if task in each.tasks]
    if task == "classification":
        # Class names of rows are not words: their spelling carries no information.
        families = [f for f in families if "spellings" not in inspect.signature(f.cls).parameters]
    return [spec for each in families for spec in each.recipe.compared]


@dataclass(frozen=True)
class HeadSpec:
    """A head that can be built for any data."""

    text: str  # the spec itself
    family: str  # the name in the catalogue, or mymodule:MyHead
    label: str  # display name in the terminal
    slug: str  # name in folders
    arguments: dict[str, Any]  # given arguments, as JSON values
    made_by: Family = field(repr=False, compare=False)

    def build(self, needs: ClassData) -> Module:
        """Build the head on the CPU; its weights depend only on the state of torch's generator."""
        try:
            return self.made_by.recipe.build(self.made_by.cls, needs, self.arguments)
        except (ValueError, TypeError) as error:
            raise SpecError(f"--head {self.text}: {error}") from error

    def as_json(self) -> dict[str, Any]:
        """For compare.json."""
        return {
            "spec": self.text, "label": self.label, "slug": self.slug, "family": self.family,
            "arguments": self.arguments,
        }  # fmt: skip


def parse_spec(text: str, *, task: str | None = "lm") -> HeadSpec:
    """Parse a spec for a task, or for any task if None; errors say what is valid."""
    name, _, rest = text.strip().partition(":")
    families = catalogue()
    try:
        family = _known(name, families)
        if family is None and rest and not re.match(r"\w+=", rest):
            family, rest = _of_user(name, *rest.partition(":")[::2])
        if family is None:
            raise SpecError(_no_head(name))
        if task is not None and task not in family.tasks:
            fitting = ", ".join(n for n, each in families.items() if task in each.tasks)
            own = " and ".join(family.tasks)
            raise SpecError(
                f"expected a head for --task {task}, got one for {own}; for {task} there are "
                f"{fitting}"
            )
        arguments = _arguments(family, rest)
    except SpecError as error:
        raise SpecError(f"--head {text}: {error}") from error
    shown = re.split(r"[:,](?=\w+=)", rest) if rest else []
    label = " ".join([family.name.rpartition(":")[2], *shown])
    slug = re.sub(r"[^a-z0-9._]+", "-", " ".join([family.name, *shown]).lower()).strip("-.")[:80]
    return HeadSpec(text.strip(), family.name, label, slug or "head", arguments, family)


def _known(name: str, families: dict[str, Family]) -> Family | None:
    """The family with this name, alias or class name, if any."""
    plain = name.lower().replace("-", "_")
    found = families.get(_ALIASES.get(plain, plain))
    return found or next((each for each in families.values() if each.cls.__name__ == name), None)


def parse_specs(texts: list[str], *, task: str | None = "lm") -> list[HeadSpec]:
    """Parse several specs, which must differ; without any, take the default ones."""
    specs: list[HeadSpec] = []
    for spec in (parse_spec(each, task=task) for each in texts or defaults_for(task or "lm")):
        for other in specs:
            if (other.family, other.arguments) == (spec.family, spec.arguments):
                raise SpecError(
                    f"--head {spec.text}: expected different heads, got the same as {other.text}"
                )
        taken = sum(other.slug.startswith(spec.slug) for other in specs)
        clash = any(other.slug == spec.slug for other in specs)
        specs.append(replace(spec, slug=f"{spec.slug}-{taken + 1}") if clash else spec)
    return specs


def _arguments(family: Family, rest: str) -> dict[str, Any]:
    """Parse ``a=1,b=2,3`` by the constructor's types; an unnamed piece continues a list."""
    valid = _valid(family)
    words = (f"{name}={kind}" for name, kind in arguments_of(family).items())
    listed = f"{family.name} takes {', '.join(words) or 'no arguments'}"
    arguments: dict[str, Any] = {}
    for piece in re.split(r",(?=[^,]*=)", rest) if rest else []:
        name, equals, value = (part.strip() for part in piece.partition("="))
        if not equals:
            what = f"expected name=value after '{family.name}:', got {piece!r}"
        elif name in _DECIDED and name not in valid:
            what = f"{name} is set from the data and the options; leave it out"
        elif name not in valid:
            what = f"no argument {name!r}{_nearest(name, valid)}"
        elif name in arguments:
            raise SpecError(f"expected {name} once, got it twice")
        else:
            try:
                arguments[name] = parse_value(
                    ",".join(map(str.strip, value.split(","))), valid[name]
                )
            except ValueError as error:
                raise SpecError(f"{name}: {error}") from error
            continue
        raise SpecError(f"{what}; {listed}")
    return arguments


def _valid(family: Family) -> dict[str, Any]:
    """The arguments that a spec may have, with their types."""
    taken = inspect.signature(family.cls).parameters
    own = {
        name: each.annotation
        for name, each in taken.items()
        if name not in _DECIDED | family.recipe.fixed.keys() | family.recipe.filled
        and each.kind != each.VAR_KEYWORD
    }
    return {**family.recipe.extra, **own}


def arguments_of(family: Family) -> dict[str, str]:
    """The arguments that a spec may have, with the names of their types."""
    return {name: type_words(kind) for name, kind in _valid(family).items()}


def _nearest(name: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(name, sorted(known), n=1, cutoff=0.5)
    return f"; did you mean {near[0]}?" if near else ""


def _no_head(name: str) -> str:
    known = sorted(catalogue())
    there = f"there are {', '.join(known)}, and mymodule:MyHead for one of your own"
    return f"no head {name!r}{_nearest(name, known)}; {there}"


def _of_user(module: str, name: str, arguments: str) -> tuple[Family, str]:
    """The family of a user's class, from a module on the path or in the current folder."""
    if not all(part.isidentifier() for part in module.split(".")):
        raise SpecError(_no_head(module))
    try:
        imported = import_from_here(module)
    except SyntaxError as error:
        where = f"{error.filename}:{error.lineno}"
        raise SpecError(f"cannot import {module}: {where}: {error.msg}") from error
    except ImportError as error:
        raise SpecError(f"cannot import {module}: {error}; {_no_head(module)}") from error
    cls = getattr(imported, name, None)
    if cls is None:
        heads = [n for n, each in vars(imported).items() if _is_head(each)]
        what = f"no class {name!r} in {module}{_nearest(name, heads)}"
        raise SpecError(f"{what}; heads in it: {', '.join(heads) or 'none'}")
    if not _is_head(cls):
        what = "expected a class that derives from lastlayer.heads.Head"
        raise SpecError(f"{what}, got {cls!r}")
    return Family(cls, Recipe(f"{module}:{name}"), (*_ONE_CLASS, "multilabel")), arguments


def _is_head(value: Any) -> bool:
    return isinstance(value, type) and issubclass(value, Head) and not inspect.isabstract(value)


def import_from_here(module: str) -> ModuleType:
    """Import a module from the path or the current folder."""
    here = os.fspath(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    return importlib.import_module(module)


_TRUE, _FALSE = ("true", "yes", "on", "1"), ("false", "no", "off", "0")


class Choice(tuple[str, ...]):
    """One of these words."""


class Pairs:
    """``2000x64,8000x16``: pairs of whole numbers."""


def parse_value(text: str, kind: Any) -> Any:
    """Parse ``text`` as a type; raises a ValueError that says what was expected."""
    for each in _kinds(kind):
        with suppress(ValueError):
            return _as(text, each)
    raise ValueError(f"expected {type_words(kind)}, got {text!r}")


def type_words(kind: Any) -> str:
    """The name of a type, for help and error messages."""
    return "|".join(dict.fromkeys(_word(each) for each in _kinds(kind)))


def _kinds(kind: Any) -> list[Any]:
    """The types of a union that a spec can contain, the narrowest first; tensors are left out."""
    order = [type(None), bool, int, float]
    kinds = [each for each in _parts(kind) if each in (*order, str, Pairs) or _is_written(each)]
    kinds = kinds or [bool, int, float, str]
    return sorted(kinds, key=lambda each: order.index(each) if each in order else len(order))


def _is_written(kind: Any) -> bool:
    return get_origin(kind) is list or isinstance(kind, Choice)


def _parts(kind: Any) -> list[Any]:
    origin, inner = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        return [part for each in inner for part in _parts(each)]
    if origin is Literal:
        return [Choice(map(str, inner))]
    if origin in (list, tuple, Sequence):
        nested = get_origin(inner[0]) in (list, tuple, Sequence)
        return [Pairs if nested else types.GenericAlias(list, inner[:1])]
    return [kind]


def _as(text: str, kind: Any) -> Any:
    """Parse ``text`` as one of the types of :func:`_kinds`, or raise ValueError."""
    if get_origin(kind) is list:
        return [_as(each, get_args(kind)[0]) for each in text.split(",")] if text else []
    if kind is Pairs and re.fullmatch(r"\d+x\d+(,\d+x\d+)*", text):
        return [[int(one) for one in each.split("x")] for each in text.split(",")]
    if kind is float:
        return float(text)
    if kind is int and "_" not in text:
        return int(text)
    if kind is bool and text.lower() in _TRUE + _FALSE:
        return text.lower() in _TRUE
    if kind is type(None) and text.lower() == "none":
        return None
    if (kind is str and text) or (isinstance(kind, Choice) and text in kind):
        return text
    raise ValueError


def _word(kind: Any) -> str:
    if isinstance(kind, Choice):
        return "|".join(kind)
    if get_origin(kind) is list:
        inner = _word(get_args(kind)[0])
        return f"{inner},{inner},…"
    names = {type(None): "none", bool: "true|false", Pairs: "INTxINT,…", str: "text"}
    return names.get(kind, getattr(kind, "__name__", str(kind)))
