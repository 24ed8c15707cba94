"""Define DSpark's Markov head and confidence head.

The Markov head computes a bias on a guess's logits from the previous tokens. The confidence head predicts the
probability that the guess is accepted. Parameters are named as in the serving format. Shapes: A blocks, S
guesses of a block, H width, r rank, V vocabulary; ``...`` any leading dimensions. ``states`` are inputs of
the target's head: the backbone's output after its final norm.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from spec_draft_dspark.shape import DSparkShape
from spec_kit.layers import INIT_STD, linear


class MarkovHead(nn.Module):
    """Computes the bias W2 · W1[previous token] on a guess's logits (head type ``vanilla``).

    ``forward`` and ``step`` return only the vector that W2 multiplies. The product is as wide as the
    draft's vocabulary, so the loss computes it for some rows at a time.
    """

    def __init__(self, shape: DSparkShape) -> None:
        """Initialize both tables with random weights."""
        super().__init__()
        self.markov_w1 = nn.Embedding(shape.target_vocab_size, shape.markov_rank)
        nn.init.normal_(self.markov_w1.weight, std=INIT_STD)
        self.markov_w2 = linear(shape.markov_rank, shape.vocab_size)

    def embed(self, token_ids: Tensor) -> Tensor:
        """Return the rows of W1 for the previous tokens, [..., r]."""
        return self.markov_w1(token_ids)

    def forward(self, states_ASH: Tensor, embedded_ASr: Tensor) -> Tensor:
        """Return the vectors that W2 multiplies, [A, S, r]: one for each of the S guesses of A blocks.

        ``embedded_ASr``: the embedding of the token before each guess.
        """
        return self.step(states_ASH, embedded_ASr, None)[0]

    def step(self, states: Tensor, embedded: Tensor, memory: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Return the vector that W2 multiplies, for one guess of each block, and the next recurrent state.

        ``memory``: the recurrent state from the previous guess; None at the first guess.
        """
        return embedded, memory


class GatedMarkovHead(MarkovHead):
    """Multiplies the previous token's embedding by the gate σ(G · [state; embedding]), channel by channel.

    G is a trained matrix.
    """

    def __init__(self, shape: DSparkShape) -> None:
        """Create the head with random weights, the gate's included."""
        super().__init__(shape)
        self.gate_proj = _biased(shape.hidden_size + shape.markov_rank, shape.markov_rank)

    def step(self, states: Tensor, embedded: Tensor, memory: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Return the gated embedding, and ``memory`` unchanged: this head has no recurrent state."""
        gate = self.gate_proj(torch.cat([states, embedded], dim=-1)).sigmoid()
        return gate * embedded, memory


class RnnMarkovHead(MarkovHead):
    """Uses a recurrent state m of the block's tokens; W2 is multiplied by tanh(o).

    [g, c, o] = J · [m; embedding of the previous token; state of the slot], where J is a trained matrix. Then
    m ← σ(g) m + (1 − σ(g)) tanh(c).
    """

    def __init__(self, shape: DSparkShape) -> None:
        """Create the head with random weights, the joint projection's included."""
        super().__init__(shape)
        self.joint_proj = _biased(2 * shape.markov_rank + shape.hidden_size, 3 * shape.markov_rank)

    def forward(self, states_ASH: Tensor, embedded_ASr: Tensor) -> Tensor:
        """Return the vectors that W2 multiplies, [A, S, r], computed one guess after the other."""
        memory = None
        outputs = list[torch.Tensor]()
        for states_AH, embedded_Ar in zip(states_ASH.unbind(1), embedded_ASr.unbind(1), strict=True):
            output_Ar, memory = self.step(states_AH, embedded_Ar, memory)
            outputs.append(output_Ar)
        return torch.stack(outputs, dim=1)

    def step(self, states: Tensor, embedded: Tensor, memory: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Return the vector that W2 multiplies, and the new recurrent state.

        At a block's first guess the old recurrent state is 0.
        """
        memory = torch.zeros_like(embedded) if memory is None else memory
        joint = self.joint_proj(torch.cat([memory, embedded, states], dim=-1))
        gate, candidate, output = joint.chunk(3, dim=-1)
        kept = gate.sigmoid()
        return output.tanh(), kept * memory + (1 - kept) * candidate.tanh()


MARKOV_HEADS = {"vanilla": MarkovHead, "gated": GatedMarkovHead, "rnn": RnnMarkovHead}


class ConfidenceHead(nn.Module):
    """Predicts the probability that a guess is accepted, from its state and optionally the previous token."""

    def __init__(self, shape: DSparkShape) -> None:
        """Initialize the projection to one number with random weights."""
        super().__init__()
        self._with_markov = shape.confidence_with_markov
        self.proj = _biased(shape.hidden_size + shape.markov_rank * self._with_markov, 1)

    def forward(self, states_ASH: Tensor, embedded_ASr: Tensor) -> Tensor:
        """Return the logits [A, S] of the acceptance probabilities."""
        inputs = torch.cat([states_ASH, embedded_ASr], dim=-1) if self._with_markov else states_ASH
        return self.proj(inputs).squeeze(-1)


def _biased(inputs: int, outputs: int) -> nn.Linear:
    """Return a linear layer with random weights and bias 0."""
    layer = nn.Linear(inputs, outputs)
    nn.init.normal_(layer.weight, std=INIT_STD)
    nn.init.zeros_(layer.bias)
    return layer
