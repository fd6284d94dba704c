"""Write what a call must know of each op beside its spec, so that a first call need not read the algorithm.

python tools/outlines.py            write dtkernels/specs/*.json anew
python tools/outlines.py --check    say which of them are not of the specs as they are now; exit status 1 if any
"""

from __future__ import annotations

import argparse
import itertools
import sys
from dataclasses import replace
from pathlib import Path

from dtkernels.lang.spec import load_spec
from dtkernels.ops.registry import SPECS
from dtkernels.runtime.operator import Operator
from dtkernels.runtime.signature import ANY_NUMBER, outline_path, outline_text

TOGETHER = 2  #: truth-valued parameters that are set at once; calls that set more read the algorithm


def settings(params: tuple) -> list[tuple]:
    """Settings of parameters, defaults left out, sorted by name; 2 stands for every larger number."""
    flags = [(name, not default) for name, default in params if isinstance(default, bool)]
    numbers = [[(), ((name, ANY_NUMBER),)] for name, default in params if not isinstance(default, bool)]
    some = [c for n in range(TOGETHER + 1) for c in itertools.combinations(flags, n)]
    return [tuple(sorted(itertools.chain(flagged, *picked))) for flagged in some for picked in itertools.product(*numbers)]


def text_of(spec: Path) -> str:
    """What the outline of a spec's file should hold."""
    operator = Operator(load_spec(spec))
    signatures = {(s, frozenset(), 0): operator.variant(s, frozenset(), 0).signature for s in settings(operator.outline.params)}
    return outline_text(replace(operator.outline, signatures=signatures), spec.read_bytes())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing")
    options = parser.parse_args()
    stale = []
    for spec in sorted(SPECS.glob("*.yaml")):
        path, text = outline_path(spec), text_of(spec)
        if not path.exists() or path.read_text() != text:
            stale.append(path)
            if not options.check:
                path.write_text(text)
    for path in stale:
        print(f"{path}: {'not of its spec as it is now; run tools/outlines.py' if options.check else 'written'}")
    return 1 if stale and options.check else 0


if __name__ == "__main__":
    sys.exit(main())
