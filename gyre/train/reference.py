"""The frozen reference policy that a KL term holds the policy to: a second set of this rank's parameters.

It is the policy that the run began with. It has no gradient and no optimizer state, and is exchanged with the
policy's own parameters only for the time of one forward pass.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn


class Reference:
    """This rank's pieces of the reference, by parameter name."""

    def __init__(self, parameters: Mapping[str, nn.Parameter], pieces: Mapping[str, Tensor]) -> None:
        """`pieces` are copied; they must have the shapes of `parameters`."""
        self._parameters = dict(parameters)
        self._pieces = {name: torch.empty_like(p).copy_(pieces[name]) for name, p in self._parameters.items()}

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """The parameters are the reference's inside."""
        self._exchange()
        try:
            yield
        finally:
            self._exchange()

    @torch.no_grad()
    def _exchange(self) -> None:
        for name, parameter in self._parameters.items():
            # Storage changes owner, nothing is copied: the optimizer and the gradient buffers know the parameter alone.
            parameter.data, self._pieces[name] = self._pieces[name], parameter.data
