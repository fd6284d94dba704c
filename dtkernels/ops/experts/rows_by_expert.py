"""Sort the choices of tokens by expert, on the device: a block of rows then reads the matrices of one or two experts."""

from __future__ import annotations

from typing import NamedTuple

import torch

from ..norms.embedding import embedding
from .sum_rows import sum_rows


class RowsByExpert(NamedTuple):
    """Where the choices (T, J) of T tokens lie among M = T * J rows sorted by expert.

    order   (M,): the choice, counted along (T, J), that lies in each row
    token   (M,): the token of each row
    place   (T, J): the row of each choice
    expert  (M,): the expert of each row
    """

    order: torch.Tensor
    token: torch.Tensor
    place: torch.Tensor
    expert: torch.Tensor

    def pick(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return (M, C): for each row its token's row of tokens (T, C)."""
        return _Rows.apply(tokens, self.token, self.place)

    def sum(self, rows: torch.Tensor) -> torch.Tensor:
        """Return (T, C): for each token the sum of its rows (M, C), added up in the order of its choices."""
        return _Rows.apply(rows, self.place, self.token)

    def of_choices(self, values: torch.Tensor) -> torch.Tensor:
        """Return (M,): the value of each row's choice; values has one for each choice."""
        return values.reshape(-1).gather(0, self.order)


def sort_by_expert(expert: torch.Tensor) -> RowsByExpert:
    """Sort choices by expert, stably, so that the result is the same in every run; expert (..., J), integers."""
    choices, each = expert.reshape(-1), expert.shape[-1]
    order = torch.argsort(choices, stable=True)
    place = torch.empty_like(order).scatter_(0, order, torch.arange(order.numel(), device=order.device)).reshape(-1, each)
    return RowsByExpert(order, order // max(each, 1), place, choices.gather(0, order))


class _Rows(torch.autograd.Function):
    """Rows by index where each row of the one side belongs to one row of the other: the gradient of picking sums, that of summing picks."""

    @staticmethod
    def forward(ctx, rows: torch.Tensor, index: torch.Tensor, inverse: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(index, inverse)
        return embedding(rows, index) if index.dim() == 1 else sum_rows(rows, index)

    @staticmethod
    def backward(ctx, gradient: torch.Tensor):  # type: ignore[override]
        index, inverse = ctx.saved_tensors
        return _Rows.apply(gradient, inverse, index), None, None


__all__ = ["RowsByExpert", "sort_by_expert"]
