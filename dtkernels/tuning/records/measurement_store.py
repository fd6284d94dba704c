"""Read and write ``measurements.safetensors``: every time of every schedule at every size, stored sparsely.

For the n-th kind of call, ``group/<n>`` is deflated JSON that names its problems and schedules. ``cold/<n>`` and ``warm/<n>`` are the
times in microseconds; ``places/<n>`` gives each one's index in the matrix (problems, schedules), in row-major order.
"""

from __future__ import annotations

import json
import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from ...runtime.tables.table import write_whole


@dataclass
class MeasurementMatrix:
    """The times of one kind of call, of shape (problems, schedules); NaN if not measured."""

    about: dict
    cold: np.ndarray
    warm: np.ndarray

    @property
    def kind(self) -> tuple:
        """Return the kind of call."""
        a = self.about
        return (a["op"], a["direction"], a["dtype"], tuple(sorted(a["params"].items())), tuple(a["wanted"]), a["saved"], tuple(a.get("kept", ())))


def read_matrices(path: Path) -> tuple[dict, list[MeasurementMatrix]]:
    """Return (what it was measured with, the matrix of each kind of call). Raises OSError, and ValueError if the file is malformed."""
    try:
        with safe_open(path, "numpy") as store:
            by, names = json.loads((store.metadata() or {}).get("by", "{}")), sorted((n for n in store.keys() if n.startswith("group/")), key=lambda n: int(n[6:]))
            return by, [_matrix(store, name.removeprefix("group/")) for name in names]
    except (KeyError, TypeError, IndexError, AttributeError, ValueError, SafetensorError, zlib.error) as error:
        raise ValueError(f"{path}: no measurements of this version: {type(error).__name__}: {error}") from None


def _matrix(store, n: str) -> MeasurementMatrix:
    about = json.loads(zlib.decompress(store.get_tensor(f"group/{n}").tobytes()))
    shape, places = (len(about["works"]), len(about["schedules"])), store.get_tensor(f"places/{n}")
    cold, warm = (np.full(shape, np.nan, np.float32) for _ in range(2))
    cold.flat[places], warm.flat[places] = store.get_tensor(f"cold/{n}"), store.get_tensor(f"warm/{n}")
    return MeasurementMatrix(about, cold, warm)


def joined(now: MeasurementMatrix, before: MeasurementMatrix) -> MeasurementMatrix:
    """Return the times of ``now``, plus those of ``before`` at sizes that ``now`` lacks; both of the same kind of call."""

    def size(work: dict) -> dict:
        return {label: extent for label, extent in work.items() if label != "held_out"}

    timed = [size(w) for w in now.about["works"]]
    rest = [i for i, w in enumerate(before.about["works"]) if size(w) not in timed]
    used = [j for j in range(len(before.about["schedules"])) if not np.isnan(before.cold[rest, j]).all()] if rest else []
    schedules = list(dict.fromkeys([*now.about["schedules"], *(before.about["schedules"][j] for j in used)]))
    places = [schedules.index(before.about["schedules"][j]) for j in used]

    def both(new: np.ndarray, old: np.ndarray) -> np.ndarray:
        whole = np.full((len(timed) + len(rest), len(schedules)), np.nan, np.float32)
        whole[: len(timed), : new.shape[1]] = new
        whole[np.ix_(range(len(timed), len(whole)), places)] = old[np.ix_(rest, used)]
        return whole

    works = [*now.about["works"], *(before.about["works"][i] for i in rest)]
    return MeasurementMatrix({**now.about, "works": works, "schedules": schedules}, both(now.cold, before.cold), both(now.warm, before.warm))


def write_joined(path: Path, by: dict, new: list[MeasurementMatrix]) -> None:
    """Write ``new``, plus what the file has for other kinds of calls and sizes. Raises as ``read_matrices`` does."""
    earlier = {m.kind: m for m in (read_matrices(path)[1] if path.exists() else [])}
    both = [joined(m, earlier.pop(m.kind)) if m.kind in earlier else m for m in new]
    write_matrices(path, by, [*both, *earlier.values()])


def write_matrices(path: Path, by: dict, matrices: list[MeasurementMatrix]) -> None:
    """Write all of them completely or not at all."""
    tensors = {}
    for n, m in enumerate(matrices):
        places = np.flatnonzero(~np.isnan(m.cold))
        told = zlib.compress(json.dumps(m.about, separators=(",", ":")).encode(), 9)
        tensors[f"group/{n}"] = np.frombuffer(told, np.uint8)
        tensors[f"places/{n}"] = places.astype(np.uint32)
        tensors |= {f"cold/{n}": m.cold.reshape(-1)[places], f"warm/{n}": m.warm.reshape(-1)[places]}
    write_whole(path, save(tensors, {"by": json.dumps(by)}))
