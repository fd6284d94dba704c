"""Run the command line: ``python -m dtkernels``."""

import sys

try:
    from .cli import main
except ModuleNotFoundError as error:
    if error.name is None or error.name.split(".")[0] == __package__:
        raise
    from .doctor import facts  # it needs no installed package

    if sys.argv[1:] == ["doctor"]:
        found = list(facts())
        print(*found, sep="\n")
        sys.exit(int(any(fact.fault for fact in found)))
    print(f"dtkernels: {error.name} is not installed; python -m dtkernels doctor says what else is not", file=sys.stderr)
    sys.exit(2)

sys.exit(main())
