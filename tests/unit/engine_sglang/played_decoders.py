"""Small decoders in SGLang's calling conventions, and a runner of SGLang whose passes a test plays."""

from dataclasses import dataclass, field

import torch
from torch import nn

from spec_core.records import FeatureSchema
from spec_engine_sglang.request_names import Assignment, name_of
from spec_engine_sglang.state_capture import StateCapture

WIDTH, LAYERS, TOKENS = 8, 3, 50
SCHEMA = FeatureSchema(layers=(0, 1, 3), hidden_size=WIDTH, dtype="float32")


class Norm(nn.Module):
    """It adds the two parts of the residual stream in place."""

    def forward(self, hidden, residual=None):
        if residual is None:
            return torch.tanh(hidden)
        residual.add_(hidden)
        hidden.copy_(torch.tanh(residual))
        return hidden, residual


class Layer(nn.Module):
    """SGLang 0.5.16: the residual stream comes in two parts."""

    def __init__(self, width):
        super().__init__()
        self.input_layernorm = Norm()
        self.linear = nn.Linear(width, width)

    def forward(self, positions, hidden_states, forward_batch, residual):
        if residual is None:
            residual = hidden_states
            hidden_states = self.input_layernorm(hidden_states)
        else:
            hidden_states, residual = self.input_layernorm(hidden_states, residual)
        return self.linear(hidden_states) + positions[:, None] / 100, residual


class LateLayer(Layer):
    """Qwen3-VL in 0.5.16: what images add behind a layer is given to the next one."""

    LATE = 0.5

    def forward(self, positions, hidden_states, forward_batch, residual, post_residual_addition=None):
        if post_residual_addition is not None:
            residual = residual + post_residual_addition
        return super().forward(positions, hidden_states, forward_batch, residual)


class NewLayer(Layer):
    """SGLang 0.5.23: the batch carries the residual; a callback is given the sum, which it must copy."""

    def forward(self, positions, hidden_states, forward_batch, capture_output=None):
        residual = forward_batch.residual
        if residual is None and capture_output is not None:
            capture_output(hidden_states)
        elif capture_output is not None:
            capture_output(hidden_states + residual, owned=True)
        hidden, forward_batch.residual = super().forward(positions, hidden_states, forward_batch, residual)
        return hidden


class CollectedLayer(NewLayer):
    """SGLang 0.5.23, Qwen3.5 and DeepSeek: a collector is given the sum."""

    attn_boundary = object()

    def forward(self, positions, hidden_states, forward_batch, captured_last_layer_outputs=None, **kwargs):
        given = captured_last_layer_outputs
        capture_output = None if given is None else given.capture
        return super().forward(positions, hidden_states, forward_batch, capture_output)


class Decoder(nn.Module):
    def __init__(self, layer_type):
        super().__init__()
        self.embed_tokens = nn.Embedding(TOKENS, WIDTH)
        self.layers = nn.ModuleList(layer_type(WIDTH) for _ in range(LAYERS))
        self.norm = Norm()

    def forward(self, input_ids, positions, forward_batch):
        hidden, residual = self.embed_tokens(input_ids), None
        for layer in self.layers:
            if isinstance(layer, NewLayer):
                hidden, residual = layer(positions, hidden, forward_batch), forward_batch.residual
            elif isinstance(layer, LateLayer) and residual is not None:
                late = torch.full_like(residual, LateLayer.LATE)
                hidden, residual = layer(
                    positions, hidden, forward_batch, residual, post_residual_addition=late
                )
            else:
                hidden, residual = layer(positions, hidden, forward_batch, residual)
        return self.norm(hidden, residual)[0]


class Model(nn.Module):
    def __init__(self, layer_type=Layer):
        super().__init__()
        self.model = Decoder(layer_type)


@dataclass
class Mode:
    extend: bool = True

    def is_extend(self):
        return self.extend


@dataclass
class Batch:
    """The fields of SGLang's ForwardBatch that are read."""

    rids: list[str]
    input_ids: torch.Tensor
    extend_seq_lens_cpu: list[int] | None
    extend_prefix_lens_cpu: list[int] | None
    forward_mode: Mode = field(default_factory=Mode)
    residual: torch.Tensor | None = None


class Exported:
    """An exporter that keeps what it is given."""

    def __init__(self):
        self.states: dict[int, torch.Tensor] = {}
        self.ids: dict[int, list[int]] = {}
        self.errors: dict[int, str] = {}

    def export(self, request_id, destinations, token_ids, hidden_TNH):
        assert request_id not in self.states, "exported twice"
        assert destinations == ("0", "2")
        assert not token_ids.is_inference()
        self.ids[request_id], self.states[request_id] = token_ids.tolist(), hidden_TNH

    def fail(self, request_id, error):
        self.errors[request_id] = str(error)


def batch_of(*parts, mode=None):
    """``parts``: (request id, ids of the whole request, first, stop)."""
    rows = [ids[first:stop] for _, ids, first, stop in parts]
    return Batch(
        rids=[name_of(Assignment(key, len(ids), ("0", "2"))) for key, ids, _, _ in parts],
        input_ids=torch.tensor([token for row in rows for token in row]),
        extend_seq_lens_cpu=[len(row) for row in rows],
        extend_prefix_lens_cpu=[first for _, _, first, _ in parts],
        forward_mode=mode or Mode(),
    )


class Runner:
    """As much of SGLang's ModelRunner as a pass needs."""

    def __init__(self, layer_type=Layer, schema=SCHEMA, image=()):
        torch.manual_seed(0)
        self.model, self.exporter = Model(layer_type), Exported()
        self.capture = StateCapture(self.model, self.exporter, schema, "norm", image)
        self.forward = self.capture.around(self._forward)
        self.extra_rows = 0

    def _forward(self, batch, pp_proxy_tensors=None):
        with torch.inference_mode():
            positions = torch.cat(
                [
                    torch.arange(first, first + length)
                    for first, length in zip(
                        batch.extend_prefix_lens_cpu, batch.extend_seq_lens_cpu, strict=True
                    )
                ]
            )
            pad = torch.zeros(self.extra_rows, dtype=torch.int64)
            ids, positions = torch.cat([batch.input_ids, pad]), torch.cat([positions, pad])
            batch.input_ids.fill_(
                0
            )  # SGLang may give its memory away while the exporter has not read the ids yet
            return self.model.model(ids, positions, batch)


def expected(runner, ids, late=0.0):
    """The stream computed out of place, from the same weights; ``late`` is added behind all layers but the last."""
    decoder = runner.model.model
    with torch.no_grad():
        stream = decoder.embed_tokens(torch.tensor(ids))
        states = [stream]
        for layer in decoder.layers:
            update = layer.linear(torch.tanh(states[-1])) + torch.arange(len(ids))[:, None] / 100
            states.append(states[-1] + update + (late if layer is not decoder.layers[-1] else 0))
    return torch.stack([states[layer] for layer in SCHEMA.layers], dim=1)


def ids_of(key, length):
    return [(7 * key + 3 * index) % TOKENS for index in range(length)]
