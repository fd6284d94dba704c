"""What makes two builds the same bytes. Imported before anything is compiled: line numbers, which name files, are left out then."""

from __future__ import annotations

import ctypes
import os
import sys

os.environ["TRITON_DISABLE_LINE_INFO"] = "1"
_NO_RANDOM_ADDRESSES, _ASK = 0x0040000, 0xFFFFFFFF  #: of Linux's personality(2)


def same_addresses() -> bool:
    """Have what this process starts lie at the same addresses each time; False where the system does not let it.

    ptxas numbers registers in the order of addresses: one PTX has given it four machine codes, and without random addresses one.
    """
    if not sys.platform.startswith("linux"):
        return False
    libc = ctypes.CDLL(None)
    now = libc.personality(_ASK)
    return now != -1 and libc.personality(now | _NO_RANDOM_ADDRESSES) != -1
