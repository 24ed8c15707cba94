"""``spec-trainer evaluate``: what was asked (``request``), every check before a start (``prepare``), decoding
(``measure``), what it came to (``document``)."""
