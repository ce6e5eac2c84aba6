"""Heads that train against a few classes and are exact in everything else."""
