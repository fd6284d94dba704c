"""Make builds reproducible byte for byte. Import it before anything is compiled: it disables line information, which names files."""

from __future__ import annotations

import ctypes
import os
import sys

os.environ["TRITON_DISABLE_LINE_INFO"] = "1"
_NO_RANDOM_ADDRESSES, _ASK = 0x0040000, 0xFFFFFFFF  #: of Linux's personality(2)


def same_addresses() -> bool:
    """Start child processes at the same addresses each time. Returns False if the system does not allow it.

    ptxas numbers registers by addresses: one PTX gave four different machine codes, and only one without random addresses.
    """
    if not sys.platform.startswith("linux"):
        return False
    libc = ctypes.CDLL(None)
    now = libc.personality(_ASK)
    return now != -1 and libc.personality(now | _NO_RANDOM_ADDRESSES) != -1
