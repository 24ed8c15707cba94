"""This package is the draft plugin of Eagle3."""
