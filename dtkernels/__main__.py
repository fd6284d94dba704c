"""``python -m dtkernels``."""

import sys

try:
    from .cli import main
except ModuleNotFoundError as error:
    if error.name is None or error.name.split(".")[0] == __package__:
        raise
    from .doctor import report  # it needs nothing that pip installs

    if sys.argv[1:] == ["doctor"]:
        print(*report(), sep="\n")
        sys.exit(0)
    print(f"dtkernels: {error.name} is not installed; python -m dtkernels doctor says what else is not", file=sys.stderr)
    sys.exit(2)

sys.exit(main())
