"""Heads that train on a few classes per step, and are exact in evaluation and prediction."""
