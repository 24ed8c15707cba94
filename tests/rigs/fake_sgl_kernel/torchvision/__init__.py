"""Import-only stand-in: SGLang imports it for pictures."""

from spec_absent import stand_in

stand_in(__name__)
