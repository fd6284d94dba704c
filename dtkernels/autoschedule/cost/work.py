"""State the work of a kernel at given sizes, which its time is predicted from."""

from __future__ import annotations

from typing import NamedTuple


class Work(NamedTuple):
    """The work of one kernel at given sizes. Amounts are of one program, but for ``memory``, ``merged``, ``copied`` and ``cleared``."""

    programs: int
    held: int  #: programs that a multiprocessor holds at once
    spilled: float  #: registers asked for over those there are, at least 1
    moved: float  #: bytes loaded through the L2, by whole sectors
    requests: float  #: loads and stores of single threads, of 16 bytes
    short: float  #: the same, of fewer bytes
    memory: float  #: bytes of the whole kernel from and to memory
    written: float  #: bytes stored
    multiplied: float  #: operations of products, of whole tiles
    ordinary: bool  #: whether one of them does not fit the matrix units
    rows: int  #: of the smallest product's tile, 0 where there is no product
    columns: int
    products: int
    heavy: float  #: special functions
    light: float  #: other arithmetic
    steps: float  #: iterations of loops
    tile_bytes: float  #: loaded in one iteration
    merged: float  #: bytes of the partial results of a split
    parts: int
    copied: float  #: bytes of tensors that are copied to aligned rows first
    narrow: bool  #: loads of less than 4 bytes, which no copy engine takes
    fetched: bool  #: loads by tensor descriptors
    itemsize: int
    added: float = 0.0  #: bytes that are added to sums in memory
    cleared: float = 0.0  #: bytes that the kernels before and after it write and read of these sums
    sums: int = 0
    strips: float = 0.0  #: rows of blocks that the whole kernel moves, where rows begin at no multiple of 16 bytes
    parted: bool = False  #: whether tiles of products are sums of powers of two
    gathered: float = 0.0  #: sums over the threads of a program
    paired: bool = False  #: several products over the same terms
    tripled: bool = False  #: products in float32 as three in TF32
    crossed: bool = False  #: whether columns of a product lie contiguous, not its sum
    masked: bool = False  #: the same, where their number is no multiple of 16: Triton knows of no vector that a mask takes whole
    depth: int = 0  #: terms of the sum in a step
    merges: int = 0  #: kernels that merge the parts of a split
    float8: bool = False  #: whether the matrix units multiply float8
    across: bool = False  #: whether rows of a float32 product lie contiguous, not its sum
    short_stores: float = 0.0  #: stores of single threads of fewer than 16 bytes, by programs that store block after block; they are among ``requests`` too
    summed: bool = False  #: whether the loop of a product also sums elements of an operand
    parted_boxes: bool = False  #: whether a box of a descriptor has single elements between its tiles
    computed: bool = False  #: whether operands of products are computed of such narrow loads
    widened: bool = False  #: whether tiles are loaded in float32 of which operands of 16 bits are made
    stored_strips: float = 0.0  #: rows of blocks that all programs store so; they are among ``strips`` too
    issued: float = 0.0  #: instructions of one warp, of a kernel without products
    runs: float = 0.0  #: pieces that lie contiguous in memory, of all blocks of the whole kernel
    passes: float = 0.0  #: of shared memory, over which warps exchange parts of sums: threads that want the same bank take one after another
    longest: float = 1.0  #: iterations of the longest program over those of the average one, as under a causal mask
    copies: int = 0  #: kernels that copy tensors to aligned rows first
    meeting: float = 0.0  #: additions of all programs to one element of a sum in memory, which take turns
    pairs: bool = False  #: whether it sums over pairs of rows element by element
    one_by_one: bool = False  #: whether a merge takes one part after another, as its blocks have several labels


class Stores(NamedTuple):
    """What a kernel stores: see the fields of ``Work`` of these names. Bytes of one program, but for ``memory``, ``merged``, ``cleared`` and rows of blocks."""

    written: float
    memory: float
    strips: float
    requests: float
    merged: float
    short: float  #: ``short_stores``
    short_strips: float  #: ``stored_strips``
    added: float
    cleared: float
