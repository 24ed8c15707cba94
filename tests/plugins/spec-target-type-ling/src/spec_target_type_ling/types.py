"""How transformers' model code reads the models of the family Ling."""

from spec_core import TargetType

BAILING_HYBRID = TargetType(theta=6_000_000.0)
