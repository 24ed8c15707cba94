"""Medusa's heads as a draft."""
