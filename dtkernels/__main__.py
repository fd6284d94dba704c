"""``python -m dtkernels``."""

import sys

from .cli import main

sys.exit(main())
