"""What several of the tests on real engines begin with."""

from addition_training import addition

__all__ = ["addition"]
