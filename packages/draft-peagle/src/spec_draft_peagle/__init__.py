"""This package is the draft plugin of P-EAGLE."""
