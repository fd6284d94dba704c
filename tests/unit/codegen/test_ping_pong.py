"""Two consumers that take blocks in turn, or share blocks in parts: the emitted text run on threads that stand for warpgroups, and what is refused.

Loads arrive late, a product reads its tiles when it is waited for, and a store when its tile is used again: a barrier too few gives wrong numbers, one too
many never ends.
"""

import random
import re
import threading

import numpy as np
import pytest
from gluon_programs import attention

from dtkernels.algebra.pipeline import prepare
from dtkernels.codegen.emit.module import emit
from dtkernels.codegen.pipeline import lower
from dtkernels.codegen.target import target
from dtkernels.codegen.transforms.warp_specialize.backend_select import backend
from dtkernels.lang import parse
from dtkernels.lang.errors import DTError

H100 = target("h100")
PRODUCT = "Func f; In A, B; Var m, n; RVar k; f[m, n] = 3 * rdot(A[m, k], B[k, n], k);"
TILES = "f.block(m:64, n:128); f.tensorize(m:64, n:128, k:64); f.map(m:m1/4, n, m1); f.descriptor(A, B, f); f.num_warps(8);"
TURNS = "f.persistent(); f.specialize_warps(k); f.ping_pong();"


class Barrier:
    """A barrier in shared memory: a phase ends when all have arrived and all bytes have come."""

    def __init__(self, lock):
        self.lock, self.phase, self.bytes = lock, 0, 0

    def init(self, count):
        self.count = self.pending = count

    def change(self, arrivals=0, size=0):
        with self.lock:
            self.pending, self.bytes = self.pending - arrivals, self.bytes + size
            assert self.pending >= 0, "more arrivals than a phase has"
            if self.pending == self.bytes == 0:
                self.phase, self.pending = self.phase + 1, self.count
            self.lock.notify_all()

    def wait(self, parity):
        with self.lock:
            assert self.lock.wait_for(lambda: self.phase & 1 != parity, timeout=20), "waits for ever"


class Tile:
    """A piece of shared memory."""

    def __init__(self, data):
        self.data = data

    def store(self, value):
        self.data[:] = value


class Shared(list):
    def index(self, i):
        return self[int(i)]


class Machine:
    """What Gluon's names stand for, on one multiprocessor."""

    def __init__(self, seed, programs, program):
        self.lock, self.rng, self.threads, self.failed = threading.Condition(), random.Random(seed), [], []
        self.stored = threading.local()
        this = self

        class gl:  # noqa: N801 (the name in the text)
            float32 = int32 = int64 = None
            constexpr = staticmethod(lambda x: x)
            cdiv = staticmethod(lambda a, b: -(-a // b))
            cast = staticmethod(lambda x, _: x)
            program_id, num_programs = staticmethod(lambda _: program), staticmethod(lambda _: programs)
            NVMMADistributedLayout = staticmethod(lambda *_: None)
            full = staticmethod(lambda shape, value, *_: (np.full(shape, value), []))

        class mbarrier:  # noqa: N801
            wait = staticmethod(lambda bar, parity: (this.dawdle(), bar.wait(parity)))
            expect = staticmethod(lambda bar, size: bar.change(1, size))
            arrive = staticmethod(lambda bar, count=1, pred=True: bar.change(count) if pred else None)

        class hopper:  # noqa: N801
            fence_async_shared = staticmethod(lambda: None)

            @staticmethod
            def warpgroup_mma(left, right, acc, is_async):
                return acc[0], [*acc[1], (left, right)]

            @staticmethod
            def warpgroup_mma_wait(outstanding, deps):
                this.dawdle()
                found = [hopper.waited(outstanding // len(deps), *sums) for sums in deps]
                return found[0] if len(deps) == 1 else tuple(found)

            @staticmethod
            def waited(outstanding, done, started):
                for left, right in started[: len(started) - outstanding]:
                    done = done + left.data @ right.data
                left_over = started[len(started) - outstanding :]
                return (done, left_over) if left_over or outstanding else Accumulator(done)

        class tma:  # noqa: N801
            store_wait = staticmethod(lambda _: this.store_wait())

        self.names = {"gl": gl, "mbarrier": mbarrier, "hopper": hopper, "tma": tma, "tma_load": self.load, "tma_store": self.store}

    def dawdle(self):
        if self.rng.random() < 0.3:
            threading.Event().wait(0.0005 * self.rng.random())

    def load(self, source, at, bar, tile):
        def bring():
            self.dawdle()
            tile.data[:] = source.box(at, tile.data.shape)
            bar.change(size=-source.block_type.nbytes)

        self.start(bring)

    def store(self, to, at, tile):
        self.stored.waiting = [*getattr(self.stored, "waiting", []), (to, at, tile)]

    def store_wait(self):
        for to, at, tile in getattr(self.stored, "waiting", []):
            to.put(at, tile.data)
        self.stored.waiting = []

    def start(self, run):
        def guarded():
            try:
                run()
            except BaseException as error:
                self.failed.append(error)

        thread = threading.Thread(target=guarded, daemon=True)
        self.threads.append(thread)
        thread.start()


class Accumulator(tuple):
    """A finished sum, on which arithmetic is done."""

    def __new__(cls, value):
        return super().__new__(cls, (value, []))

    def __rmul__(self, factor):
        return Value(factor * self[0])


class Value(np.ndarray):
    def __new__(cls, data):
        return np.asarray(data).view(cls)

    def to(self, _):
        return self


class Descriptor:
    dtype = float

    def __init__(self, tensor, size):
        self.tensor, self.block_type = tensor, type("Type", (), {"nbytes": size})

    def box(self, at, shape):
        found = np.zeros(shape)
        part = self.tensor[at[0] : at[0] + shape[0], at[1] : at[1] + shape[1]]
        found[: part.shape[0], : part.shape[1]] = part
        return found

    def put(self, at, data):
        part = self.tensor[at[0] : at[0] + data.shape[0], at[1] : at[1] + data.shape[1]]
        part[:] = data[: part.shape[0], : part.shape[1]]


@pytest.mark.parametrize("m, n, k, programs, stages", [(7, 9, 5, 1, 3), (16, 16, 2, 2, 4), (24, 20, 12, 2, 2), (4, 8, 40, 3, 5), (30, 30, 6, 4, 4)])
def test_blocks_in_turn_are_right_whoever_waits_for_whom(m, n, k, programs, stages):
    """One block, fewer blocks than programs, fewer steps than the ring has slots, and odd numbers of each."""
    check(PRODUCT + TILES + TURNS, (m, n, k), programs, stages, lambda rows, step, out, a, b: dict(
        B_desc=Descriptor(b, 1), f_desc=Descriptor(out, 1), A_tiles=tiles(stages, rows, step), B_tiles=tiles(stages, step, 8), f_tiles=tiles(2, rows, 8), BLOCK_n=8, ROWS_m=rows,
    ))  # fmt: skip


@pytest.mark.parametrize("turns", [False, True])
@pytest.mark.parametrize("m, n, k, programs, stages", [(7, 90, 5, 1, 3), (16, 200, 8, 2, 4), (9, 333, 12, 3, 2)])
def test_parts_of_a_block_are_right_whoever_waits_for_whom(m, n, k, programs, stages, turns):
    """96 columns as 64 and 32, whose results leave through memory of their own; rows shared by the consumers, or blocks taken in turn."""
    text = PRODUCT + TILES.replace("n:128", "n:96") + TURNS
    text = text if turns else text.replace("f.ping_pong();", "").replace("m:64", "m:128")
    check(text, (m, n, k), programs, stages, lambda rows, step, out, a, b: dict(
        B_desc=Descriptor(b, 1), B_desc_1=Descriptor(b, 1), f_desc=Descriptor(out, 1), f_desc_1=Descriptor(out, 1), BLOCK_n=96, TILE_n=64, TILE_n_1=32,
        A_tiles=tiles(stages, rows, step) if turns else tiles(2 * stages, rows // 2, step), B_0_tiles=tiles(stages, step, 64), B_64_tiles=tiles(stages, step, 32),
        f_tiles=tiles(2, rows if turns else rows // 2, 64), f_n_64_tiles=tiles(2, rows if turns else rows // 2, 32), ROWS_m=rows if turns else rows // 2,
    ), 1 if turns else 2)  # fmt: skip


def tiles(count: int, *shape: int) -> Shared:
    return Shared(Tile(np.full(shape, np.nan)) for _ in range(count))


def check(text: str, sizes: tuple[int, int, int], programs: int, stages: int, memory, readers: int = 1) -> None:
    """Run a product of whole numbers, whose sums are exact. ``memory`` gives its descriptors and shared memory; ``readers``: of each tile."""
    m, n, k = sizes
    source = emit(prepare(parse(text)), "call", H100)
    functions = re.findall(r"@gluon\.jit\n(def f_gluon_(?:consumer|producer)\(.*?)(?=\n@|\ndef )", source, re.S)
    assert len(functions) == 2
    draws = np.random.default_rng(m * n + k)
    a, b = draws.integers(-4, 5, (m, k)).astype(float), draws.integers(-4, 5, (k, n)).astype(float)
    rows, step, out = 4, 2, np.full((m, n), np.nan)
    for program in range(programs):
        machine = Machine(program, programs, program)
        names = dict(machine.names)
        for function in functions:
            exec(function, names)
        full, free, turn = (Shared(Barrier(machine.lock) for _ in range(count)) for count in (stages, stages, 2))
        for bar in (*full, *turn):
            bar.init(1)
        for bar in free:
            bar.init(readers)
        given = dict(
            A_desc=Descriptor(a, 1), A_full=full, A_free=free, turn=turn, size_m=m, size_n=n, size_k=k, INDEX=None, STAGES=stages, TILE_k=step, BLOCK_m=rows, GROUP_m=4,
            **memory(rows, step, out, a, b),
        )  # fmt: skip

        def call(name, names=names, given=given, **more):
            function = names[name]
            taken = function.__code__.co_varnames[: function.__code__.co_argcount]
            function(**{x: v for x, v in {**given, **more}.items() if x in taken})

        machine.start(lambda call=call: call("f_gluon_producer"))
        for wg in range(2):
            machine.start(lambda call=call, wg=wg: call("f_gluon_consumer", WG=wg))
        for thread in machine.threads:  # loads join the list while it is walked
            thread.join(30)
        assert not machine.failed, machine.failed
    assert np.array_equal(out, 3 * (a @ b))


def reason(text: str) -> str:
    (kernel,) = lower(prepare(parse(text)))
    return backend(kernel, H100)[1]


def test_what_cannot_take_turns_is_left_to_triton_with_a_reason():
    assert reason(PRODUCT + TILES + TURNS) == "2 consumers of 64 rows of m"
    assert reason(PRODUCT + TILES.replace("m:64", "m:256") + TURNS) == "256 rows for each of 2 consumers in turn; 64 or 128 for each of 2"
    assert "registers" in reason(PRODUCT + TILES.replace("m:64", "m:128").replace("n:128", "n:256") + TURNS)
    assert reason(attention().replace("m:128", "m:64") + "att.ping_pong();") == "ping_pong of what is no persistent kernel of products that only add up"


@pytest.mark.parametrize("without", ["f.persistent();", "f.specialize_warps(k);"])
def test_what_ping_pong_needs_is_said(without):
    with pytest.raises(DTError, match="ping_pong needs two warpgroups that stay for several blocks"):
        lower(prepare(parse(PRODUCT + TILES + TURNS.replace(without, ""))))
    with pytest.raises(DTError, match="ping_pong needs two warpgroups"):
        lower(prepare(parse(PRODUCT + TILES.replace("num_warps(8)", "num_warps(4)") + TURNS)))
