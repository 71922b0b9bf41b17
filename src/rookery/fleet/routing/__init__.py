"""Which replica takes which call, and what happens when it is lost."""

__all__: list[str] = []
