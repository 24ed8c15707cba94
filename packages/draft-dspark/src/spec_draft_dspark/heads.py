"""The heads of DSpark: what biases a guess by the tokens before it, and the chance that it is accepted.

Parameter names are the serving format's. Shapes: A blocks, S guesses of a block, H width, r rank, V vocabulary;
``...`` any rows. ``states`` are inputs of the target's head: the backbone's, behind its final norm.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from spec_kit.drafting import INIT_STD, linear

if TYPE_CHECKING:
    from torch import Tensor

    from spec_draft_dspark.shape import DSparkShape


class MarkovHead(nn.Module):
    """The bias W2 · W1[token before] on a guess's logits (head type ``vanilla``).

    ``forward`` and ``step`` return what W2 is multiplied by; the product is as wide as the vocabulary, and the loss
    makes it for some rows at a time.
    """

    def __init__(self, shape: DSparkShape) -> None:
        """Draw both tables."""
        super().__init__()
        self.markov_w1 = nn.Embedding(shape.target_vocab_size, shape.markov_rank)
        nn.init.normal_(self.markov_w1.weight, std=INIT_STD)
        self.markov_w2 = linear(shape.markov_rank, shape.target_vocab_size)

    def embed(self, token_ids: Tensor) -> Tensor:
        """Return W1's rows [..., r] of the tokens before."""
        return self.markov_w1(token_ids)

    def forward(self, states_ASH: Tensor, embedded_ASr: Tensor) -> Tensor:
        """Return [A, S, r], given each guess's state and the embedded token before it."""
        return self.step(states_ASH, embedded_ASr, None)[0]

    def step(self, states: Tensor, embedded: Tensor, memory: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Return the same for one guess of each block, and what the next one remembers; None at the first."""
        return embedded, memory


class GatedMarkovHead(MarkovHead):
    """The embedded token is multiplied by σ(G · [state; embedded]), channel by channel."""

    def __init__(self, shape: DSparkShape) -> None:
        """Draw the gate, too."""
        super().__init__(shape)
        self.gate_proj = _biased(shape.hidden_size + shape.markov_rank, shape.markov_rank)

    def step(self, states: Tensor, embedded: Tensor, memory: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Return the gated embedding; nothing is remembered."""
        gate = self.gate_proj(torch.cat([states, embedded], dim=-1)).sigmoid()
        return gate * embedded, memory


class RnnMarkovHead(MarkovHead):
    """A recurrent state m of the block's tokens; W2 is multiplied by tanh(o).

    [g, c, o] = J · [m; embedded; state], then m ← σ(g) m + (1 − σ(g)) tanh(c).
    """

    def __init__(self, shape: DSparkShape) -> None:
        """Draw the joint projection, too."""
        super().__init__(shape)
        self.joint_proj = _biased(2 * shape.markov_rank + shape.hidden_size, 3 * shape.markov_rank)

    def forward(self, states_ASH: Tensor, embedded_ASr: Tensor) -> Tensor:
        """Return [A, S, r], one guess after the other."""
        memory, outputs = None, list[torch.Tensor]()
        for states_AH, embedded_Ar in zip(states_ASH.unbind(1), embedded_ASr.unbind(1), strict=True):
            output_Ar, memory = self.step(states_AH, embedded_Ar, memory)
            outputs.append(output_Ar)
        return torch.stack(outputs, dim=1)

    def step(self, states: Tensor, embedded: Tensor, memory: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Return the output and the state after it; a block begins with 0."""
        memory = torch.zeros_like(embedded) if memory is None else memory
        joint = self.joint_proj(torch.cat([memory, embedded, states], dim=-1))
        gate, candidate, output = joint.chunk(3, dim=-1)
        kept = gate.sigmoid()
        return output.tanh(), kept * memory + (1 - kept) * candidate.tanh()


MARKOV_HEADS = {"vanilla": MarkovHead, "gated": GatedMarkovHead, "rnn": RnnMarkovHead}


class ConfidenceHead(nn.Module):
    """The chance that a guess is accepted, of its state and, if the shape says so, the token before."""

    def __init__(self, shape: DSparkShape) -> None:
        """Draw the projection to one number."""
        super().__init__()
        self._with_markov = shape.confidence_with_markov
        self.proj = _biased(shape.hidden_size + shape.markov_rank * self._with_markov, 1)

    def forward(self, states_ASH: Tensor, embedded_ASr: Tensor) -> Tensor:
        """Return logits [A, S] of that chance."""
        inputs = torch.cat([states_ASH, embedded_ASr], dim=-1) if self._with_markov else states_ASH
        return self.proj(inputs).squeeze(-1)


def _biased(inputs: int, outputs: int) -> nn.Linear:
    """Return a drawn linear layer whose bias starts with 0."""
    layer = nn.Linear(inputs, outputs)
    nn.init.normal_(layer.weight, std=INIT_STD)
    nn.init.zeros_(layer.bias)
    return layer
