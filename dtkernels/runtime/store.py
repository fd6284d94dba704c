"""Compiled kernels in a safetensors file: machine code as uint8 tensors, what a launch must know as JSON in the header.

The file is read by hand: the header once, code only when it is asked for. A name in the file is the checksum of what it
stands for, so that equal kernels of several rows are stored once and a damaged one is noticed.

Header: ``entry/<name>`` what one kernel takes (``Entry``), ``host/<name>`` the text that allocates and launches,
``rows`` and ``table`` a copy of the table's rows with the checksum of the YAML it is of, tensors ``<checksum>``.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import zlib
from dataclasses import asdict, dataclass
from pathlib import Path

from .table import write_whole

FORMAT = "dtkernels 1"
_LARGEST_HEADER = 1 << 27
_SMALL = 1 << 15  #: bytes of machine code
_XZ = b"\xfd7zXZ\x00"  #: what an xz file begins with


class StoreError(ValueError):
    """A binary store that is refused; one line that names the file and what is wrong."""


@dataclass(frozen=True)
class Entry:
    """One compiled kernel and the arguments it may be launched with.

    ``types`` has every parameter, in the kernel's order: a type, or "constexpr" for one that is baked in, with its value in
    ``constants``. ``divisible`` are those that must be multiples of 16.
    """

    kernel: str
    host: str  #: the host text that launches it
    code: str  #: the tensor with its machine code
    arch: int | str
    types: dict[str, str]
    constants: dict[str, object]
    divisible: tuple[str, ...]
    threads: int  #: of a block
    shared: int  #: bytes
    scratch: tuple[int, int] = (0, 1)  #: global bytes a program, and their alignment
    blocks: int = 1  #: of a cluster
    built: str = ""  #: the Triton that compiled it
    ir: str = ""  #: digest of the Triton IR it was compiled from

    def text(self) -> str:
        """The entry as JSON, always the same for the same entry."""
        return json.dumps(asdict(self) | {"constants": dict(sorted(self.constants.items()))}, separators=(",", ":"))

    @property
    def name(self) -> str:
        return digest(self.text().encode())

    @staticmethod
    def parse(text: str) -> Entry:
        data = json.loads(text)
        return Entry(**{**data, "divisible": tuple(data["divisible"]), "scratch": tuple(data["scratch"])})


def digest(data: bytes) -> str:
    """The name of ``data`` in a store: 16 hex digits behind a letter, so that no reader takes it for a number."""
    return "x" + hashlib.sha256(data).hexdigest()[:16]


class Store:
    """A binary store on disk. Raises StoreError when opened if the file is not whole."""

    def __init__(self, path: Path):
        self.path = path
        with path.open("rb") as f:
            try:
                self._data = mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ)
            except ValueError:
                raise StoreError(f"{path}: empty") from None
        size = len(self._data)
        length = int.from_bytes(self._data[:8], "little")
        if size < 8 or not 2 <= length <= min(size - 8, _LARGEST_HEADER):
            raise StoreError(f"{path}: cut short: {size} bytes")
        try:
            header = json.loads(self._data[8 : 8 + length])
            self.metadata: dict[str, str] = header.pop("__metadata__")
            self._places = {name: tuple(t["data_offsets"]) for name, t in header.items()}
            last = max((end for _, end in self._places.values()), default=0)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise StoreError(f"{path}: the header is damaged: {type(error).__name__}") from None
        if self.metadata.get("format") != FORMAT:
            raise StoreError(f"{path}: its format is {self.metadata.get('format')!r}; allowed: {FORMAT!r}")
        self._start = 8 + length
        if self._start + last != size:
            raise StoreError(f"{path}: {size} bytes; its header tells of {self._start + last}")

    def entry(self, name: str) -> Entry | None:
        """The entry called ``name``, None if there is none. Raises StoreError."""
        text = self._checked(f"entry/{name}", name)
        try:
            return Entry.parse(text) if text is not None else None
        except (ValueError, KeyError, TypeError) as error:
            raise StoreError(f"{self.path}: entry {name} is damaged: {type(error).__name__}") from None

    def host(self, name: str) -> str | None:
        """The host text called ``name``."""
        return self._checked(f"host/{name}", name)

    def code(self, name: str) -> bytes:
        """The machine code called ``name``. Raises StoreError where it is missing or not what it was."""
        try:
            begin, end = self._places[name]
            data = _unpacked(self._data[self._start + begin : self._start + end])
        except (KeyError, ValueError, TypeError, EOFError, ImportError, zlib.error) as error:
            raise StoreError(f"{self.path}: kernel {name} is {'missing' if isinstance(error, KeyError) else 'damaged'}") from None
        if digest(data) != name:
            raise StoreError(f"{self.path}: kernel {name} is damaged")
        return data

    def names(self) -> tuple[str, ...]:
        """Names of all entries."""
        return tuple(sorted(k.removeprefix("entry/") for k in self.metadata if k.startswith("entry/")))

    def _checked(self, key: str, name: str) -> str | None:
        text = self.metadata.get(key)
        if text is not None and (not isinstance(text, str) or digest(text.encode()) != name):
            raise StoreError(f"{self.path}: {key} is damaged")
        return text


def _packed(code: bytes) -> bytes:
    """Small kernels as zlib, quick to unpack in a first call; large ones as xz, a third smaller."""
    if len(code) < _SMALL:
        return zlib.compress(code, 9)
    import lzma

    return lzma.compress(code, check=lzma.CHECK_NONE, preset=9 | lzma.PRESET_EXTREME)


def _unpacked(data: bytes) -> bytes:
    if data[:6] != _XZ:
        return zlib.decompress(data)
    import lzma  # not every Python has it; without it such kernels are compiled at the call

    try:
        return lzma.decompress(data)
    except lzma.LZMAError as error:
        raise ValueError(str(error)) from None


def write_store(path: Path, entries: list[Entry], hosts: dict[str, str], codes: dict[str, bytes], rows: str = "", table: str = "") -> None:
    """Write a store whole or not at all; the same bytes for the same contents. ``rows`` is JSON, ``table`` the YAML's digest."""
    metadata = {"format": FORMAT, "rows": rows, "table": table}
    metadata |= {f"entry/{e.name}": e.text() for e in entries} | {f"host/{name}": text for name, text in hosts.items()}
    header: dict[str, object] = {"__metadata__": dict(sorted(metadata.items()))}
    body = bytearray()
    for name, code in sorted(codes.items()):
        packed = _packed(code)
        header[name] = {"dtype": "U8", "shape": [len(packed)], "data_offsets": [len(body), len(body) + len(packed)]}
        body += packed
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    write_whole(path, len(text).to_bytes(8, "little") + text + bytes(body))
