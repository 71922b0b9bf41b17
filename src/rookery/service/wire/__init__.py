"""What travels: protobuf and JSON bodies as records, and results as bodies.

schema.py       the protobuf messages; tensors of both formats as arrays
body.py         raw bodies: size, zstd, which format; large JSON in slices
records.py      the trainer's own requests and outputs, for Rookery's client
requests.py     JSON requests, one class each
training.py     forward_backward: body -> TrainCall, outputs -> body
losses.py       TrainCall -> the trainer's data and losses
samples.py      completions and scores -> body
"""

__all__: list[str] = []
