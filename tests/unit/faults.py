"""Errors planted in a model's passes."""

import pytest
import torch

from rookery.slots import SlottedModel


class Fault:
    """While it has an `error`, the model's next `num` passes after `num_good` ones end with it;
    later ones are as before."""

    def __init__(self, model: SlottedModel, monkeypatch: pytest.MonkeyPatch) -> None:
        self.error: Exception | None = None
        self.num = 1
        self.num_good = 0
        plain = model.layers

        def layers(*args: object, **kwargs: object) -> torch.Tensor:
            error = self.error
            if error is not None and self.num_good:
                self.num_good -= 1
            elif error is not None:
                self.num -= 1
                if not self.num:
                    self.error, self.num = None, 1
                raise error
            return plain(*args, **kwargs)  # type: ignore[arg-type]

        monkeypatch.setattr(model, "layers", layers)
