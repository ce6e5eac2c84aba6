"""What other libraries call: each module needs one of them, and nothing else does."""
