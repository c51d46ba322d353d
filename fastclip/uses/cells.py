"""torch's recurrent cells, and LSTMs with a projection: step by step, their products by themselves."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from fastclip.uses.composite import composite


def _lstm_cell(
    x: Tensor, states: Sequence[Tensor], w_ih: Tensor, w_hh: Tensor, b_ih: Tensor | None = None,
    b_hh: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    h, c = states
    return lstm_step(F.linear(x, w_ih, b_ih) + F.linear(h, w_hh, b_hh), c)


def lstm_step(gates: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
    """The states after a step of an LSTM with these gates."""
    i, f, g, o = gates.chunk(4, -1)
    c = f.sigmoid() * c + i.sigmoid() * g.tanh()
    return o.sigmoid() * c.tanh(), c


def _gru_cell(
    x: Tensor, h: Tensor, w_ih: Tensor, w_hh: Tensor, b_ih: Tensor | None = None,
    b_hh: Tensor | None = None,
) -> Tensor:  # fmt: skip
    (r, z, n), (of_r, of_z, of_n) = (
        share.chunk(3, -1) for share in (F.linear(x, w_ih, b_ih), F.linear(h, w_hh, b_hh))
    )
    z, n = (z + of_z).sigmoid(), (n + (r + of_r).sigmoid() * of_n).tanh()
    return n + z * (h - n)


def _cell(
    activation: Callable[[Tensor], Tensor], x: Tensor, h: Tensor, w_ih: Tensor, w_hh: Tensor,
    b_ih: Tensor | None = None, b_hh: Tensor | None = None,
) -> Tensor:  # fmt: skip
    return activation(F.linear(x, w_ih, b_ih) + F.linear(h, w_hh, b_hh))


def projected(
    gates: Sequence[Tensor], alive: Sequence[Tensor | None], h: Tensor, c: Tensor,
    w_hh: Tensor, b_hh: Tensor | None, w_hr: Tensor,
) -> tuple[list[Tensor], Tensor, Tensor]:  # fmt: skip
    """An LSTM whose states are projected, h_t = W_hr (o * tanh(c_t)).

    Args:
        gates: the input's share at every step, [b, 4 * hidden]. h: [b, p]. c: [b, hidden].
        alive: whether each sequence has this step, [b, 1]; None where all have.

    Returns:
        The states h after every step; the last h and c of every sequence.
    """
    out = []
    for step, goes_on in zip(gates, alive, strict=True):
        full, cell = lstm_step(step + F.linear(h, w_hh, b_hh), c)
        state = F.linear(full, w_hr)
        out.append(state)
        h = state if goes_on is None else torch.where(goes_on, state, h)
        c = cell if goes_on is None else torch.where(goes_on, cell, c)
    return out, h, c


composite(torch.lstm_cell, _lstm_cell)
composite(torch.gru_cell, _gru_cell)
composite(torch.rnn_tanh_cell, partial(_cell, torch.tanh))
composite(torch.rnn_relu_cell, partial(_cell, torch.relu))
