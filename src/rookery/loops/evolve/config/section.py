"""A section of OpenEvolve's config: types are exact, as they are there."""

from pydantic import ConfigDict

from rookery.config import Config

__all__ = ["Section"]


class Section(Config):
    """Text is never read as a number, a number never as a flag; a whole number is a float too."""

    model_config = ConfigDict(strict=True)
