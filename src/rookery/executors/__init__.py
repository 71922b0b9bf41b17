"""Executors of jobs: processes of this machine, the nodes of a Ray cluster, Modal.

All three implement the Executor port over one pool; `worker.py` defines what a worker runs.
"""

from rookery.executors.folder import FolderPackage, pack_folder
from rookery.executors.local import open_local
from rookery.executors.modal import open_modal
from rookery.executors.ray import open_ray
from rookery.executors.worker import WorkerSpec, WorkerTask

__all__ = [
    "FolderPackage",
    "WorkerSpec",
    "WorkerTask",
    "open_local",
    "open_modal",
    "open_ray",
    "pack_folder",
]
