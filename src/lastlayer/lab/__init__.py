"""The lab: the same model with each head under the same budget, and which one suits your data."""
