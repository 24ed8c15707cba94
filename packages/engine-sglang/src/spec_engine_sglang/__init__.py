"""Engine ``sglang``: unmodified SGLang runs the target; states are captured through SGLang's plugin entry point."""
