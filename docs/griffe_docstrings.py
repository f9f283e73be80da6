"""Prepare docstrings for the reference pages, and warn about missing descriptions."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import griffe

ROLE = re.compile(r":(?:func|class|meth|mod|attr|data|exc):`~?([^`]+)`")
PAGES = Path(__file__).with_name("reference")
OPTIONS: dict[str, Any] = {
    "warnings": False, "returns_multiple_items": False, "returns_named_value": False,
}  # fmt: skip


class Docstrings(griffe.Extension):
    """Write references, such as :func:`init`, as plain code, and warn about missing descriptions.

    On the pages, a class without a docstring has that of its base.
    """

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = ROLE.sub(r"`\1`", obj.docstring.value)

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        share(pkg)
        for page in sorted(PAGES.glob("*.md")):
            for name in re.findall(r"^::: (\S+)$", page.read_text(encoding="utf-8"), re.MULTILINE):
                package, _, path = name.partition(".")
                if package == pkg.name:
                    for gap in gaps(target(pkg[path]), name):
                        griffe.logger.warning("%s: %s", page.name, gap)
        if pkg.name == "gpudist":
            for path in registered():
                for gap in gaps(target(pkg[path]), path):
                    griffe.logger.warning("gpudist: %s", gap)


def registered() -> Iterator[str]:
    """Yield the paths in gpudist of what pages take from the tables of layers and operators."""
    from gpudist.nn import LAYERS
    from gpudist.ops import OPERATORS

    for layer in LAYERS:
        yield f"nn.{layer.name}"
    for row in OPERATORS:
        module = row.kind.__module__.partition(".")[2]
        yield f"{module}.{row.name}"
        yield f"{module}.{row.kind.__name__}"


def share(module: griffe.Module) -> None:
    """Give the docstring of the first base to classes without one."""
    for kind in module.classes.values():
        bases = [] if kind.is_alias or kind.docstring is not None else kind.resolved_bases
        if bases and bases[0].docstring is not None:
            kind.docstring = griffe.Docstring(bases[0].docstring.value, parent=kind)
    for part in module.modules.values():
        if not part.is_alias:
            share(part)


def target(found: Any) -> Any:
    return found.final_target if found.is_alias else found


def gaps(found: Any, name: str) -> Iterator[str]:
    """Yield what the docstring of a public name lacks: a text, an argument, or the return value.

    An argument is described by an entry, or by any text that names it. Without a list of
    arguments, the text describes what a function returns.
    """
    if found.docstring is None or not found.docstring.value.strip():
        yield f"{name} has no docstring"
        return
    sections = found.docstring.parse("google", **OPTIONS)
    text = "".join(section.value for section in sections if section.kind.value == "text")
    entries = list(entries_of(sections, "parameters"))
    # The arguments of a dataclass are its attributes.
    fields = list(entries_of(sections, "attributes"))
    for entry in (*entries, *fields):
        if not entry.description.strip():
            yield f"{name}: {entry.name} has no description"
    order = arguments_of(found)
    described = {each for entry in (*entries, *fields) for each in named(entry.name, order)}
    for argument in order:
        if argument not in described and not re.search(rf"`[^`]*\b{argument}\b[^`]*`", text):
            yield f"{name}: argument {argument} is not described"
    kinds = {section.kind.value for section in sections}
    returns = found.is_function and str(found.returns) not in ("None", "NoReturn")
    if returns and entries and not kinds & {"returns", "yields"}:
        yield f"{name}: what it returns is not described"
    if found.is_class:
        for part, member in found.members.items():
            if not part.startswith("_") and not member.is_alias and member.docstring is not None:
                yield from gaps(member, f"{name}.{part}")


def arguments_of(found: Any) -> list[str]:
    """Return the names of the arguments of a function, or of a class's constructor."""
    function = found.all_members.get("__init__") if found.is_class else found
    if function is None or not (function := target(function)).is_function:
        return []
    return [
        each.name.lstrip("*") for each in function.parameters
        if each.name not in ("self", "cls") and not each.name.startswith("_")
    ]  # fmt: skip


def entries_of(sections: Sequence[Any], kind: str) -> Iterator[Any]:
    for section in sections:
        if section.kind.value == kind:
            yield from section.value


def named(entry: str, order: Sequence[str]) -> list[str]:
    """Return the arguments of an entry: ``a, b``, or ``a ... d`` for all from ``a`` to ``d``."""
    first, _, last = entry.partition(" ... ")
    if last:
        return list(order[order.index(first) : order.index(last) + 1])
    return [each.lstrip("*") for each in entry.split(", ")]
