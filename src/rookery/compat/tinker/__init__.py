"""The protocol of the `tinker` SDK: requests and answers of its clients.

schema.py           samples; tensors of both formats as arrays
training.py         forward_backward: body -> the trainer's data and losses, outputs -> body
format.py           all of these as the service's `Format`
session_routes.py   HTTP: sessions, samples, results
training_routes.py  HTTP: training, checkpoints, downloads
"""

__all__: list[str] = []
