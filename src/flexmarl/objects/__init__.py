"""Set and get packed tensors by key, from every process of a run. Start with `host.py`.

Nothing here imports torch until tensors are asked for: `packed`, `info`, `delete` and `set` of a `PackedObject` are
the standard library alone.
"""

from flexmarl.objects.files import read_safetensors, write_safetensors
from flexmarl.objects.folder import create_run_folder, list_run_folders, remove_run_folder
from flexmarl.objects.host import HostObjectPlane
from flexmarl.objects.tensors import as_flat_tensor, copy_into, tensor_layout, unpack, unpack_object

__all__ = [
    "HostObjectPlane",
    "as_flat_tensor",
    "copy_into",
    "create_run_folder",
    "list_run_folders",
    "read_safetensors",
    "remove_run_folder",
    "tensor_layout",
    "unpack",
    "unpack_object",
    "write_safetensors",
]
