"""Write each op's manifest beside its spec, so that a first call need not parse the algorithm or derive a gradient.

python tools/write_manifests.py            write dtkernels/specs/*.json
python tools/write_manifests.py --check    name manifests that differ from the current specs and tables; exit status 1 if any

A manifest has signatures for the usual parameters, and gradients for the calls that a table has rows for. Other calls are
compiled at their first use, and what they need is derived then.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from common.cli_types import Parser

from dtkernels.lang.spec import load_spec
from dtkernels.ops.registry import SPECS
from dtkernels.runtime.bind.operator import Operator, Variant
from dtkernels.runtime.signature.op_manifest import ANY_NUMBER, gradient_line, manifest_path, manifest_text, signature_line
from dtkernels.runtime.signature.signature import Halves
from dtkernels.runtime.tables.table import read_rows

TABLES = Path(__file__).resolve().parent.parent / "schedule_tables"
TOGETHER = 2  #: truth-valued parameters that are set together; calls that set more parse the algorithm


def settings(params: tuple) -> list[tuple]:
    """Return settings of parameters, without defaults, sorted by name; 2 stands for every larger number."""
    flags = [(name, not default) for name, default in params if isinstance(default, bool)]
    numbers = [[(), ((name, ANY_NUMBER),)] for name, default in params if not isinstance(default, bool)]
    some = [c for n in range(TOGETHER + 1) for c in itertools.combinations(flags, n)]
    return [tuple(sorted(itertools.chain(flagged, *picked))) for flagged in some for picked in itertools.product(*numbers)]


def differentiated(op: str) -> list[tuple[tuple, tuple[str, ...]]]:
    """Return (parameters, wanted) of the rows of all tables."""
    rows = (row for path in sorted(TABLES.glob(f"*/{op}.yaml")) for row in read_rows(path.read_text(), str(path)))
    return sorted({(tuple(sorted(row.params.items())), row.wanted) for row in rows if row.wanted and not row.batched}, key=str)


def halves(variant: Variant, wanted: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Halves]]:
    """Return (kept, gradient data) for each set of products that forward may be asked to keep."""
    names = [p.name for p in variant.products]
    for kept in (c for n in range(len(names) + 1) for c in itertools.combinations(names, n)):
        pair = variant.pair(wanted, kept)
        forward = None if pair.forward is variant else pair.forward.signature
        yield kept, pair.gradient._replace(forward=forward, backward=pair.backward.signature)


def text_of(spec: Path) -> str:
    """Return the manifest text for a spec's file."""
    operator = Operator(load_spec(spec))
    lines = []
    for params in settings(operator.manifest.params):
        variant = operator.variant(params, frozenset(), 0)
        lines.append(signature_line(params, variant.signature, variant.products))
    for params, wanted in differentiated(operator.name):
        lines += [gradient_line(params, wanted, *found) for found in halves(operator.variant(params, frozenset(), 0), wanted)]
    return manifest_text(replace(operator.manifest, lines=tuple(lines)), spec.read_bytes())


def main() -> int:
    parser = Parser("write_manifests", __doc__)
    parser.add_argument("--check", action="store_true", help="write nothing")
    options = parser.parse_args()
    stale = []
    for spec in sorted(SPECS.glob("*.yaml")):
        path, text = manifest_path(spec), text_of(spec)
        if not path.exists() or path.read_text() != text:
            stale.append(path)
            if not options.check:
                path.write_text(text)
    for path in stale:
        print(f"{path}: {'not of its spec and tables as they are now; run tools/write_manifests.py' if options.check else 'written'}")
    return 1 if stale and options.check else 0


if __name__ == "__main__":
    sys.exit(main())
