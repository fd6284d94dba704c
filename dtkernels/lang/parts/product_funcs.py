"""Name matrix products inside definitions, and give them Funcs of their own: what the parts that name products share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from ..expr import Access, Dot, Label

if TYPE_CHECKING:
    from ..algorithm import Algorithm, Definition


def product_names(algorithm: Algorithm, word: str, is_named: Callable[[Definition, Dot], bool]) -> dict[str, Dot]:
    """Map names to the products that ``is_named``: ``f_word``, the second of ``f`` ``f_word2``."""
    taken, found = {*algorithm.names}, dict[str, Dot]()
    for d in algorithm.definitions:
        own = [n for n in dict.fromkeys(d.expr.walk()) if isinstance(n, Dot) and is_named(d, n)]
        for i, dot in enumerate((n for n in own if n not in found.values()), 1):
            name = f"{d.name}_{word}{i if i > 1 else ''}"
            while name in taken:
                name += "_"
            found[name] = dot
    return found


def with_product(algorithm: Algorithm, name: str, dot: Dot, labels_in: Callable[[Definition], tuple[str, ...]]) -> Algorithm:
    """Return the algorithm with a Func of the product before the first Func that reads it; as it is where nothing has the product any more.

    ``labels_in``: the labels of the product's Func, by the definition that it is first in.
    """
    first = next((i for i, d in enumerate(algorithm.definitions) if dot in d.expr.walk()), None)
    if first is None:
        return algorithm
    labels = labels_in(algorithm.definitions[first])
    access = Access(name, tuple(map(Label, labels)))
    changed = tuple(replace(d, expr=d.expr.transform(lambda n: access if n == dot else n)) for d in algorithm.definitions)
    made = replace(changed[first], name=name, labels=labels, expr=dot)
    return algorithm.with_definitions((*changed[:first], made, *changed[first:]))
