"""Store compiled kernels in a safetensors file: machine code as uint8 tensors, launch data as JSON.

The header is searched once. Everything else is read on demand. Each name is a checksum of its contents, so that rows share equal
kernels and damage is detected.

Tensors:

- ``<checksum>``: compressed machine code.
- ``texts``: all other contents. Each is compressed alone and follows a line with its name and length:
  ``entry/<checksum>`` describes one kernel (``StoredKernel``), ``host/<checksum>`` is a wrapper that allocates and launches,
  ``rows/<kind>`` holds the table rows of one kind of call as JSON, behind a line with their checksum.
- ``dictionary``: the zlib dictionary that all texts share. The texts are similar, and each can still be read alone.

Metadata: ``table``, the checksum of the YAML that the rows were copied from; ``seal``, in stores of a user's tables, an HMAC of the
file by the user's key, computed with zeros in its place.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import mmap
import re
import zlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path

from .table import Row, RowKey, call_kind_text, write_whole

FORMAT = "dtkernels 4"
_LARGEST_HEADER = 1 << 27
_SMALL = 1 << 15  #: bytes; smaller machine code is compressed with zlib, larger with xz
_XZ = b"\xfd7zXZ\x00"  #: magic bytes of an xz file
_MARK = re.compile(rb"\n((?:entry|host|rows)/x[0-9a-f]{16}) (\d{1,9})\n")  #: the line before each text
_LONGEST_MARK = 40
_METADATA = b'{"__metadata__":'  #: the start of every header
_TENSOR = re.compile(rb'"\w+":\{"dtype":"U8","shape":\[\d+\],"data_offsets":\[(\d+),(\d+)\]\}')
_SEAL, _UNSEALED = re.compile(rb'"seal":"([0-9a-f]{64})"'), "0" * 64
_LAST = re.compile(rb",(\d+)\]\}\} *\Z")  #: the end of the last tensor's entry, which ends the header
_LONGEST_END = 40
_TUPLES = {"wanted", "kept", "batched", "binaries"}  #: fields of a row that JSON holds as lists
TENSOR_MAP = "tensordesc<"  #: what the type of a parameter that is a tensor map begins with
_ROOM = {"rows/": 3000, "host/": 8000, "entry/": 6000}  #: bytes of each sort in the dictionary


class StoreError(ValueError):
    """A binary store is refused. The message is one line that names the file and the fault."""


@dataclass(frozen=True)
class Encoding:
    """How a kernel reads a tensor map: the swizzle of shared memory, the type of elements and their bytes, and the box of one copy."""

    swizzle: int
    kind: int
    itemsize: int
    box: tuple[int, ...]

    @staticmethod
    def of(metadata: dict) -> Encoding:
        """Read what Triton says of a compiled kernel's map. Raises KeyError where this version differs, or for a form that is not used here."""
        if metadata["fp4_padded"] or metadata.get("is_im2col"):
            raise KeyError("a map of another form")
        return Encoding(metadata["swizzle"], metadata["elem_type"], metadata["elem_size"], tuple(metadata["block_size"]))


@dataclass(frozen=True)
class StoredKernel:
    """Describe one compiled kernel and the arguments it accepts.

    ``types`` maps every parameter, in the kernel's order, to its type. A constexpr parameter has the type "constexpr" and its value in
    ``constants``. Parameters in ``divisible`` must be multiples of 16, those in ``steps`` of a smaller power of two.
    """

    kernel: str
    host: str  #: name of the wrapper that launches it
    code: str  #: name of the tensor with its machine code
    arch: int | str
    types: dict[str, str]
    constants: dict[str, object]
    divisible: tuple[str, ...]
    threads: int  #: per block
    shared: int  #: bytes
    scratch: tuple[int, int] = (0, 1)  #: bytes of global scratch memory per program, and their alignment
    blocks: int = 1  #: blocks per cluster
    built: str = ""  #: version of Triton that compiled it
    ir: str = ""  #: digest of its Triton IR
    steps: dict[str, int] = field(default_factory=dict)
    maps: dict[str, dict] = field(default_factory=dict)  #: of each parameter that is a tensor map, how the kernel reads it, as Triton says it

    def text(self) -> str:
        """Return the entry as JSON; equal entries give equal text."""
        plain = asdict(self) | {"constants": dict(sorted(self.constants.items()))}
        return json.dumps({k: v for k, v in plain.items() if k not in ("steps", "maps") or v}, separators=(",", ":"))

    @cached_property
    def multiples(self) -> dict[str, int]:
        """Return the divisor required of each parameter, where it is more than 1."""
        return dict.fromkeys(self.divisible, 16) | self.steps

    @cached_property
    def checked_parameters(self) -> tuple[list, list, list, list, list]:
        """Group the parameters by the check that a launch needs.

        Returns (place, type, divisor) of pointers, (place, whether 64-bit, divisor) of integers, places of floats,
        (place, name, value) of constexprs, and (place, type) of tensor maps.
        """
        found: tuple[list, list, list, list, list] = ([], [], [], [], [])
        for i, (name, kind) in enumerate(self.types.items()):
            step = self.multiples.get(name, 1)
            if kind == "constexpr":
                found[3].append((i, name, self.constants.get(name)))
            elif kind == "fp32":
                found[2].append(i)
            elif kind in ("i32", "i64"):
                found[1].append((i, kind == "i64", step))
            elif kind.startswith(TENSOR_MAP):
                found[4].append((i, kind))
            else:
                found[0].append((i, kind.replace("u1", "i1"), step))
        return found

    @cached_property
    def encodings(self) -> dict[str, Encoding]:
        """Return how each tensor map is encoded."""
        return {name: Encoding.of(metadata) for name, metadata in self.maps.items()}

    @cached_property
    def given(self) -> tuple[tuple[int, str, str], ...]:
        """Return (place, name, type) of each argument that a launch passes."""
        return tuple((i, name, kind) for i, (name, kind) in enumerate(self.types.items()) if kind != "constexpr")

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Return the names of the parameters."""
        return tuple(self.types)

    @property
    def name(self) -> str:
        return digest(self.text().encode())

    @staticmethod
    def parse(text: str) -> StoredKernel:
        data = json.loads(text)
        return StoredKernel(**{**data, "divisible": tuple(data["divisible"]), "scratch": tuple(data["scratch"])})


def digest(data: bytes) -> str:
    """Return the name of ``data`` in a store: 16 hex digits behind a letter, so that YAML never reads it as a number."""
    return "x" + hashlib.sha256(data).hexdigest()[:16]


class KernelStore:
    """A binary store on disk. Opening an incomplete file raises StoreError."""

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
        self._header, self._start = self._data[8 : 8 + length], 8 + length
        try:
            metadata = json.loads(self._header[len(_METADATA) : self._header.index(b"}") + 1])
            found, self.table = metadata.get("format"), metadata.get("table")
            words, texts = self._span("dictionary"), self._span("texts")
            last = int(_LAST.search(self._header, len(self._header) - _LONGEST_END)[1])  # type: ignore[index]
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
            raise StoreError(f"{path}: the header is damaged: {type(error).__name__}") from None
        if found != FORMAT:
            raise StoreError(f"{path}: its format is {found!r}; allowed: {FORMAT!r}")
        if self._start + last != size:
            raise StoreError(f"{path}: {size} bytes; its header tells of {self._start + last}")
        self._texts = (self._start + texts[0], self._start + texts[1])
        self._dictionary = self._data[self._start + words[0] : self._start + words[1]]
        self._entries: dict[str, StoredKernel] = {}  #: entries read so far: each new length asks for the same ones
        self._hosts: dict[str, str] = {}

    def sealed_with(self, key: bytes | None) -> bool:
        """Return whether the owner of ``key`` wrote this very file. Reads all of it."""
        found = _SEAL.search(self._header, 0, 256)
        return bool(key and found) and hmac.compare_digest(_seal(self._data, 8 + found.start(1), key), found[1].decode())  # type: ignore[arg-type,union-attr,index]

    def _span(self, name: str) -> tuple[int, int]:
        """Return (begin, end) of a tensor. Searches the header instead of parsing it: a first call needs few of hundreds of tensors."""
        at = self._header.find(b'"%b":{' % name.encode())
        match = _TENSOR.match(self._header, at) if at >= 0 else None
        if match is None:
            raise KeyError(name)
        return int(match[1]), int(match[2])

    def entry(self, name: str) -> StoredKernel:
        """Return the entry called ``name``. Raises StoreError where it is missing or damaged."""
        if (known := self._entries.get(name)) is not None:
            return known
        text = self._checked(f"entry/{name}", name)
        try:
            return self._entries.setdefault(name, StoredKernel.parse(text))
        except (ValueError, LookupError, TypeError) as error:
            raise StoreError(f"{self.path}: entry {name} is damaged: {type(error).__name__}") from None

    def host(self, name: str) -> str:
        """Return the wrapper text called ``name``. Raises StoreError where it is missing or damaged."""
        if name not in self._hosts:
            self._hosts[name] = self._checked(f"host/{name}", name)
        return self._hosts[name]

    def code(self, name: str) -> bytes:
        """Return the machine code called ``name``. Raises StoreError where it is missing or damaged."""
        try:
            begin, end = self._span(name)
            data = _unpacked(self._data[self._start + begin : self._start + end])
        except (LookupError, ValueError, TypeError, EOFError, ImportError, zlib.error) as error:
            raise StoreError(f"{self.path}: kernel {name} is {'missing' if isinstance(error, KeyError) else 'damaged'}") from None
        if digest(data) != name:
            raise StoreError(f"{self.path}: kernel {name} is damaged")
        return data

    def names(self, kind: str = "entry") -> tuple[str, ...]:
        """Return the names of all entries, or of all wrapper texts (``host``)."""
        begin, end = self._texts
        found = (m[1].decode().split("/") for m in _MARK.finditer(self._data, begin, end))
        return tuple(sorted(name for of, name in found if of == kind))

    def rows(self, key: RowKey | None = None) -> tuple[Row, ...]:
        """Return the stored rows of a call's kind, or all rows where ``key`` is None. Raises StoreError.

        Numeric parameters are not part of a kind (``call_kind``).
        """
        names = self.names("rows") if key is None else (digest(call_kind_text(key).encode()),)
        found = []
        try:
            for name in names:
                if (text := self._text(f"rows/{name}")) is not None:
                    found += json.loads(self._verified_rows(text))
            return tuple(_row(row) for _, row in sorted(found, key=lambda r: r[0]))
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
            raise error if isinstance(error, StoreError) else StoreError(f"{self.path}: its rows are damaged: {type(error).__name__}") from None

    def _verified_rows(self, text: bytes) -> bytes:
        """Verify the checksum of rows and strip it. A row with a damaged parameter would run a kernel that computes something else."""
        told, _, rows = text.partition(b"\n")
        if told.decode(errors="replace") != digest(rows):
            raise StoreError(f"{self.path}: its rows are damaged")
        return rows

    def _checked(self, key: str, name: str) -> str:
        text = self._text(key)
        if text is None or digest(text) != name:
            raise StoreError(f"{self.path}: {key} is {'missing' if text is None else 'damaged'}")
        return text.decode()

    def _text(self, key: str) -> bytes | None:
        """Find a text by binary search. Texts are sorted by name, so that a first call touches few pages of the file."""
        (low, end), wanted = self._texts, key.encode()
        high = end
        while low < high:
            middle = (low + high) // 2
            mark = _MARK.search(self._data, middle, min(end, high + _LONGEST_MARK))
            if mark is None or mark.start() >= high or mark[1] > wanted:
                high = middle
            elif mark[1] < wanted:
                low = mark.end()
            elif mark.end() + int(mark[2]) > end:
                raise StoreError(f"{self.path}: {key} is damaged")
            else:
                return self._decompressed(self._data[mark.end() : mark.end() + int(mark[2])], key)
        return None

    def _decompressed(self, packed: bytes, key: str) -> bytes:
        try:
            return zlib.decompressobj(-15, self._dictionary).decompress(packed)
        except zlib.error:
            raise StoreError(f"{self.path}: {key} is damaged") from None


class KernelStores:
    """Several stores as one. A kernel is taken from the first that has it; its name says what it contains."""

    def __init__(self, stores: Sequence[KernelStore]):
        self.stores = tuple(stores)
        self.path = self.stores[0].path

    def entry(self, name: str) -> StoredKernel:
        """Return the entry called ``name``. Raises StoreError where no store has it whole."""
        return self._first("entry", name)

    def host(self, name: str) -> str:
        """Return the wrapper text called ``name``. Raises StoreError where no store has it whole."""
        return self._first("host", name)

    def code(self, name: str) -> bytes:
        """Return the machine code called ``name``. Raises StoreError where no store has it whole."""
        return self._first("code", name)

    def names(self) -> tuple[str, ...]:
        """Return the names of all entries, each once."""
        return tuple(dict.fromkeys(name for store in self.stores for name in store.names()))

    def _first(self, kind: str, name: str):
        for i, store in enumerate(self.stores):
            try:
                return getattr(store, kind)(name)
            except StoreError:
                if i + 1 == len(self.stores):
                    raise


def _seal(data: bytes | mmap.mmap, at: int, key: bytes) -> str:
    """Return the HMAC of a store whose seal begins ``at``."""
    whole = memoryview(data)
    try:
        found = hmac.new(key, whole[:at], "sha256")
        found.update(_UNSEALED.encode())
        found.update(whole[at + len(_UNSEALED) :])
        return found.hexdigest()
    finally:
        whole.release()


def _row(plain: dict) -> Row:
    for name in _TUPLES & plain.keys():
        plain[name] = tuple(plain[name])
    return Row(**plain)


def _compressed(code: bytes) -> bytes:
    """Compress machine code: small kernels with zlib, which unpacks fast; large ones with xz, which is a third smaller."""
    if len(code) < _SMALL:
        return zlib.compress(code, 9)
    import lzma

    return lzma.compress(code, check=lzma.CHECK_NONE, preset=9 | lzma.PRESET_EXTREME)


def _unpacked(data: bytes) -> bytes:
    if data[:6] != _XZ:
        return zlib.decompress(data)
    import lzma  # some builds of Python lack it; such kernels are then compiled at the call

    try:
        return lzma.decompress(data)
    except lzma.LZMAError as error:
        raise ValueError(str(error)) from None


def write_store(path: Path, entries: list[StoredKernel], hosts: dict[str, str], codes: dict[str, bytes], rows: Sequence[Row] = (), table: str = "",
                key: bytes | None = None) -> None:  # fmt: skip
    """Write a store atomically. Equal contents give equal bytes.

    ``rows`` are the table's rows, ``table`` is the digest of its YAML. ``key`` seals the store.
    """
    texts = {f"entry/{e.name}": e.text() for e in entries} | {f"host/{name}": text for name, text in hosts.items()} | _row_texts(rows)
    header: dict[str, object] = {"__metadata__": {"format": FORMAT, "table": table} | ({"seal": _UNSEALED} if key else {})}
    body = bytearray()
    parts = {name: _compressed(code) for name, code in codes.items()}
    words = parts["dictionary"] = _dictionary(texts)
    packed = {k: _deflate(texts[k].encode(), words) for k in sorted(texts)}
    parts["texts"] = b"".join(b"\n%b %d\n%b" % (k.encode(), len(t), t) for k, t in packed.items())
    for name, part in sorted(parts.items()):
        header[name] = {"dtype": "U8", "shape": [len(part)], "data_offsets": [len(body), len(body) + len(part)]}
        body += part
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    whole = len(text).to_bytes(8, "little") + text + bytes(body)
    if key:
        at = whole.index(_UNSEALED.encode())
        whole = whole[:at] + _seal(whole, at, key).encode() + whole[at + len(_UNSEALED) :]
    write_whole(path, whole)


def _dictionary(texts: dict[str, str]) -> bytes:
    """Sample texts of each sort evenly. The most frequent sort comes last, where back references are shortest."""
    words = b""
    for sort, room in _ROOM.items():
        own = [texts[k].encode() for k in sorted(texts) if k.startswith(sort)]
        every = max(1, sum(map(len, own)) // room)
        words += b"".join(own[::every])[:room]
    return words


def _deflate(text: bytes, words: bytes) -> bytes:
    packer = zlib.compressobj(9, zlib.DEFLATED, -15, 9, zlib.Z_DEFAULT_STRATEGY, words)
    return packer.compress(text) + packer.flush()


def _row_texts(rows: Sequence[Row]) -> dict[str, str]:
    """Group the rows by kind, each with its place in the table."""
    kinds: dict[str, list] = {}
    for place, row in enumerate(rows):
        plain = {k: v for k, v in asdict(row).items() if v not in ({}, (), None)}
        kinds.setdefault(f"rows/{digest(call_kind_text(row.key).encode())}", []).append([place, plain])
    plain = {name: json.dumps(found, separators=(",", ":")) for name, found in kinds.items()}
    return {name: f"{digest(text.encode())}\n{text}" for name, text in plain.items()}
