"""Build the spec of ``ops.merge_attention``."""

from __future__ import annotations

from ...lang.parser import parse
from ...lang.spec import Spec
from ...runtime.signature.arguments import Interface
from ..registry import built, interfaces

NAME = "merge_attention"
ALGORITHM = """
Func apart, merge_attention, lse;
In A, B, lse_a, lse_b;
Var x, n;
apart[x] = where(lse_a[x] == -inf and lse_b[x] == -inf, 0, lse_a[x] - lse_b[x]);
merge_attention[x, n] = A[x, n] * sigmoid(apart[x]) + B[x, n] * sigmoid(-apart[x]);
lse[x] = maximum(lse_a[x], lse_b[x]) + log(1 + exp(-abs(apart[x])));
merge_attention.compile();
lse.compile();
"""


def merge_spec() -> Spec:
    """Return the spec: a weighted sum of two results, and the logarithm of the sum of their totals."""
    return Spec(NAME, "Merge two partial results of attention.", parse(ALGORITHM, NAME), source=NAME)


built[NAME] = merge_spec
interfaces[NAME] = Interface({"A": "a (..., N)", "B": "b (..., N)", "lse_a": "lse_a (...)", "lse_b": "lse_b (...)"})
