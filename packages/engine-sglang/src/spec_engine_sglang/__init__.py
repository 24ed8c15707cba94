"""This package is the engine ``sglang``: unmodified SGLang runs the target.

It captures states through SGLang's entry point for plugins.
"""
