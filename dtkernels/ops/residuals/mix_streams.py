import torch

from ..op_decorator import only_tensors, op


@op(X="streams (T, I, C)", M="mixing (T, O, I)", F="output (T, C)", u="gain (T, O)")
def mix_streams(streams: torch.Tensor, mixing: torch.Tensor, output: torch.Tensor | None = None, gain: torch.Tensor | None = None) -> torch.Tensor:
    """Return mixing @ streams + gain * output: the residual streams of hyper-connections, each token with a mixing of its own (Zhu et al., 2024; Xie et al., mHC, 2025).

    A row of mixing gives the input of a block, mixing (..., 1, I) without an output; a square one the streams after it. Shapes: streams
    (..., I, C); mixing (..., O, I); output (..., C) and gain (..., O) together or not at all; the result (..., O, C) in the promoted dtype,
    added up in float32. Differentiable in all four. Raises ValueError where shapes disagree, TypeError where an argument is not a tensor.

    >>> mix_streams(torch.ones(1, 2, 3), torch.tensor([[[0.5, 0.5], [1.0, 0.0]]]), torch.ones(1, 3), torch.tensor([[0.0, 2.0]]))
    tensor([[[1., 1., 1.],
             [3., 3., 3.]]])
    """
    if (output is None) != (gain is None):
        raise ValueError("mix_streams: output and gain are given together; found one of them")
    both = {} if output is None or gain is None else {"output": output, "gain": gain}
    only_tensors("mix_streams", streams=streams, mixing=mixing, **both)
    rows = streams.shape[:-2]
    fits = streams.dim() >= 2 and mixing.dim() == streams.dim() and mixing.shape[:-2] == rows and mixing.shape[-1] == streams.shape[-2]
    if output is not None and gain is not None:
        fits = fits and output.shape == (*rows, streams.shape[-1]) and gain.shape == mixing.shape[:-1]
    if not fits:
        shapes = ", ".join(str(tuple(t.shape)) for t in (streams, mixing, *both.values()))
        raise ValueError(f"mix_streams: streams is (..., I, C), mixing (..., O, I), output (..., C), gain (..., O); got shapes {shapes}")
    count = rows.numel()
    flat: dict = {"X": streams.reshape(count, *streams.shape[-2:]), "M": mixing.reshape(count, *mixing.shape[-2:])}
    if output is not None and gain is not None:
        flat |= {"added": True, "F": output.reshape(count, output.shape[-1]), "u": gain.reshape(count, gain.shape[-1])}
    return mix_streams.operator()(**flat).reshape(*rows, mixing.shape[-2], streams.shape[-1])
