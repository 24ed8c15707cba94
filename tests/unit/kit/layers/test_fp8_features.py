"""States in 8 bits against rounding to e4m3 in float64, over a table of all of its numbers."""

import math

import pytest
import torch

from spec_core.records import FeatureSchema
from spec_kit.layers import encode_features
from spec_kit.layers.fp8_features import decode_features

MAGNITUDES = torch.tensor(
    [m * 2.0**-9 for m in range(8)]
    + [(1 + m / 8) * 2.0 ** (e - 7) for e in range(1, 16) for m in range(8)][:-1],
    dtype=torch.float64,
)
"""The numbers of the codes 0 to 126, of 4 bits of exponent and 3 of mantissa; 127 is NaN."""
SIZE = 37


def rounded(row):
    """The codes of a row that is already divided by its scale: nearest number, of two the one with an even code."""
    distance = (row.abs()[:, None] - MAGNITUDES).abs()
    is_nearest = distance == distance.amin(
        1, keepdim=True
    )  # two of them, one even, if the row's number is halfway
    code = (is_nearest * (2 - torch.arange(len(MAGNITUDES)) % 2)).argmax(1)
    return code + 128 * row.signbit()


def round_trip(hidden_TNH, dtype="float32"):
    layers = tuple(range(hidden_TNH.shape[1]))
    schema = FeatureSchema(layers=layers, hidden_size=SIZE, dtype=dtype, sent_dtype="fp8_e4m3")
    sent = encode_features(hidden_TNH, schema)
    assert (sent.dtype, sent.shape) == (schema.sent.torch_dtype(), schema.sent.shape(len(hidden_TNH)))
    decoded = torch.full_like(hidden_TNH, 7)
    decode_features(sent, decoded)
    return sent, decoded


def drawn(tokens=5, layers=3, seed=0):
    return torch.randn(tokens, layers, SIZE, generator=torch.Generator().manual_seed(seed))


HALFWAY = torch.cat(
    [MAGNITUDES[-1:], (MAGNITUDES[40:75] + MAGNITUDES[41:76]) / 2, -MAGNITUDES[50:51]]
).float()
TINY = torch.finfo(torch.float32).tiny
ROWS = {
    "normal": drawn(),
    "one channel is far larger": torch.where(torch.arange(SIZE) == 3, 3000.0, drawn()),
    "halfway between two numbers": HALFWAY.expand(2, 1, SIZE),
    "below the smallest normal float32": drawn() * TINY / 8,
    "few bits above nothing": drawn() * 1e-42,
    "the largest float32": drawn().sign() * torch.finfo(torch.float32).max,
    "more than are converted at once": drawn(3000, 2),
}


@pytest.mark.parametrize("name", ROWS)
def test_rows_are_rounded_as_in_float64(name):
    hidden_TNH = ROWS[name].contiguous()
    sent, decoded = round_trip(hidden_TNH)
    for row, encoded, result in list(
        zip(hidden_TNH.flatten(0, 1), sent.flatten(0, 1), decoded.flatten(0, 1), strict=True)
    )[-600:]:
        scale = max(float((row.abs().max().double() / 448).float()), TINY)
        assert encoded[SIZE:].clone().view(torch.float32).item() == scale
        codes = rounded((row.double() / scale).float().double())
        assert encoded[:SIZE].tolist() == codes.tolist()
        expected = torch.where(codes < 128, 1, -1) * MAGNITUDES[codes % 128] * scale
        assert torch.equal(result, expected.float())


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_other_dtypes_keep_their_largest_numbers_and_lose_at_most_a_sixteenth(dtype):
    hidden_TNH = drawn().to(getattr(torch, dtype))
    hidden_TNH[0] = torch.finfo(hidden_TNH.dtype).max * drawn(1)[0].sign()
    _, decoded = round_trip(hidden_TNH, dtype)
    assert decoded.dtype == hidden_TNH.dtype
    assert torch.equal(decoded[0], hidden_TNH[0])
    smallest = hidden_TNH.double().abs().amax(-1, keepdim=True) / 448 * 2.0**-10
    error = (decoded.double() - hidden_TNH.double()).abs()
    assert (error <= torch.maximum(hidden_TNH.double().abs() / 16, smallest) * (1 + 2.0**-7)).all()


def test_zero_stays_zero_and_a_row_with_nan_or_infinity_is_nan_beside_sound_rows():
    hidden_TNH = drawn(5, 2)
    hidden_TNH[1] = 0
    hidden_TNH[2, 0, 4], hidden_TNH[3, 1, 5], hidden_TNH[4, 0, 6] = math.nan, math.inf, -math.inf
    _, decoded = round_trip(hidden_TNH)
    assert decoded[1].eq(0).all()
    damaged = torch.zeros(5, 2, dtype=torch.bool)
    damaged[2, 0] = damaged[3, 1] = damaged[4, 0] = True
    assert decoded[damaged].isnan().all()
    assert decoded[~damaged].isfinite().all()


def test_states_in_the_dtype_of_the_target_are_sent_as_they_are():
    schema = FeatureSchema(layers=(1, 2, 3), hidden_size=SIZE, dtype="bfloat16")
    hidden_TNH = drawn().bfloat16()
    assert encode_features(hidden_TNH, schema) is hidden_TNH
    decoded = torch.zeros_like(hidden_TNH)
    decode_features(hidden_TNH, decoded)
    assert torch.equal(decoded, hidden_TNH)
