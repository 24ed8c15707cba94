"""This package is the draft plugin of LiLiCorr, which scores paths through the candidates of a block."""
