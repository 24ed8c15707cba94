"""A decoder in SGLang 0.5.16's calling convention: the stream in two parts, a norm that adds them in place."""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import nn


class Norm(nn.Module):
    def forward(self, hidden, residual=None):
        if residual is None:
            return torch.tanh(hidden)
        residual.add_(hidden)
        hidden.copy_(torch.tanh(residual))
        return hidden, residual


class Layer(nn.Module):
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


class Model(nn.Module):
    def __init__(self, folder):
        super().__init__()
        config = json.loads((Path(folder) / "config.json").read_text())
        torch.manual_seed(0)
        self.model = nn.Module()
        self.model.embed_tokens = nn.Embedding(config["vocab_size"], config["hidden_size"])
        layers = (Layer(config["hidden_size"]) for _ in range(config["num_hidden_layers"]))
        self.model.layers = nn.ModuleList(layers)
        self.model.norm = Norm()

    def forward(self, input_ids, positions, forward_batch):
        hidden, residual = self.model.embed_tokens(input_ids), None
        for layer in self.model.layers:
            hidden, residual = layer(positions, hidden, forward_batch, residual)
        return self.model.norm(hidden, residual)[0]

    def states(self, ids):
        """[T, N + 1, H], out of place."""
        with torch.no_grad():
            stream = [self.model.embed_tokens(torch.tensor(ids))]
            for layer in self.model.layers:
                update = layer.linear(torch.tanh(stream[-1])) + torch.arange(len(ids))[:, None] / 100
                stream.append(stream[-1] + update)
        return torch.stack(stream, dim=1)


class Draft(nn.Module):
    """An exported draft's tensors, which nothing runs."""

    def __init__(self, folder):
        super().__init__()
        tensors = load_file(Path(folder) / "model.safetensors")
        self.tensors = nn.ParameterDict(
            {name.replace(".", "/"): nn.Parameter(tensor, False) for name, tensor in tensors.items()}
        )

    def load_weights(self, weights):
        for name, tensor in weights:
            self.tensors[name.replace(".", "/")].data.copy_(tensor)
