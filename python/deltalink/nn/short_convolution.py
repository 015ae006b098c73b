"""The short convolution's parameters."""

from __future__ import annotations

from torch import Tensor, nn

from ..convolution import causal_conv1d


class ShortConvolution(nn.Conv1d):
    """A depthwise causal convolution; ``weight`` is ``[D, 1, W]``, as of ``torch.nn.Conv1d`` with ``groups=D``."""

    def __init__(self, hidden_size: int, kernel_size: int, bias: bool = False, activation: str | None = "silu"):
        super().__init__(hidden_size, hidden_size, kernel_size, groups=hidden_size, bias=bias, padding=kernel_size - 1)
        self.hidden_size = hidden_size
        self.activation = activation

    @property
    def taps(self) -> Tensor:
        """``[D, W]``."""
        return self.weight.squeeze(1)

    def forward(
        self, x: Tensor, cache: Tensor | None = None, output_final_state: bool = False, cu_seqlens=None, cp=None
    ) -> tuple[Tensor, Tensor | None]:
        """See :func:`deltalink.causal_conv1d`; ``cache`` is the initial state, ``[N, D, W - 1]``, and is not changed."""
        return causal_conv1d(
            x,
            self.taps,
            self.bias,
            initial_state=cache,
            output_final_state=output_final_state,
            activation=self.activation,
            cu_seqlens=cu_seqlens,
            cp=cp,
        )
