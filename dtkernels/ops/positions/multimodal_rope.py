import torch

from ..op_decorator import only_tensors, op
from ..option_checks import check_integer


@op(Q="q (B, H, S, D)", K="k (B, G, S, D)", cos="cos (3, B, S, D)", sin="sin (3, B, S, D)", first="sections[0]", second="sections[0] + sections[1]")
def multimodal_rope(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, sections: tuple[int, int, int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return RoPE by three positions, in time, height and width, for tokens of text, images and video (Wang et al., Qwen2-VL, 2024), in halves.

    Frequency i of the D / 2 takes the first, second or third of the positions as sections say: sections[0] frequencies the first, sections[1]
    the second, the others the third. Shapes: q (B, H, S, D); k (B, G, S, D); cos and sin (3, B, S, D); sections add up to D / 2. Returns
    both in the promoted dtype. Differentiable in q, k, cos and sin. Raises ValueError where shapes disagree, TypeError where an argument is
    not a tensor.

    >>> q, k = multimodal_rope(*torch.ones(2, 1, 1, 2, 4), torch.zeros(3, 1, 2, 4), torch.ones(3, 1, 2, 4), (1, 1, 0))
    >>> q[0, 0, 0]
    tensor([-1., -1.,  1.,  1.])
    """
    name = "multimodal_rope"
    only_tensors(name, q=q, k=k, cos=cos, sin=sin)
    fits = q.dim() == k.dim() == cos.dim() == 4 and cos.shape == sin.shape and q.shape[::2] == k.shape[::2] and q.shape[-1] == k.shape[-1]
    if not fits or q.shape[-1] % 2 or tuple(cos.shape) != (3, q.shape[0], *q.shape[2:]):
        shapes = ", ".join(str(tuple(t.shape)) for t in (q, k, cos, sin))
        raise ValueError(f"{name}: q is (B, H, S, D) with D even, k (B, G, S, D), cos and sin (3, B, S, D); got shapes {shapes}")
    if not isinstance(sections, (tuple, list)):
        raise TypeError(f"{name}: sections is {sections!r}; allowed: three integers")
    for i, size in enumerate(sections):
        check_integer(name, f"sections[{i}]", size, 0)
    if len(sections) != 3 or sum(sections) != q.shape[-1] // 2:
        raise ValueError(f"{name}: sections are three numbers that add up to D / 2, {q.shape[-1] // 2}; got {tuple(sections)}")
    return multimodal_rope.operator()(Q=q, K=k, cos=cos, sin=sin, first=int(sections[0]), second=int(sections[0] + sections[1]))
