"""The tier of the interpreter, in fewer steps: see tests/quick_interpreter.py."""

import os

if os.environ.get("TRITON_INTERPRET") == "1":
    from quick_interpreter import install

    install()
