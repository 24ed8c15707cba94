"""This package puts prompts to the target: to measure a draft, or to collect answers."""
