"""The command ``spec-trainer evaluate``.

Its modules in order: the request, every check before a start (``prepare``), decoding (``measure``), the document.
"""
