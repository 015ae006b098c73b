"""What a layer carries from one piece of a sequence to the next."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class LayerState(NamedTuple):
    """The state of one layer after its tokens, for its ``past_key_values``."""

    convolution: tuple[Tensor, Tensor, Tensor] | None
    """The last W - 1 inputs of the convolutions of q, k and v, ``[N, D, W - 1]``."""
    recurrent: Tensor
    """float32 ``[N, HV, V, K]``."""
