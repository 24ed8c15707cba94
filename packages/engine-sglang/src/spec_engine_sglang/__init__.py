"""Engine ``sglang``: the target run by stock SGLang, captured through SGLang's own plugin entry point."""
