"""TransferQueue as the other side of `store.py`, in an environment that holds it: the same rows, put and got.

Its controller and storage units are Ray actors with their own processes; producer and consumer are processes too. A put
is `put` of a TensorDict; a get is `get_meta` (which marks the rows as consumed) and `get_data`. Nothing is durable, and
there is no acknowledgement or commit. The TensorDicts are made before the clock starts.

Usage: peer_transfer_queue.py (see `store_job.serve`)
"""

import logging
import os
import sys
import time
from collections.abc import Mapping
from contextlib import ExitStack
from importlib import import_module
from typing import Any

from store_job import NUM_VALUES, Side, serve, values_of

# By name: none of them is installed where this file is type-checked.
ray: Any = import_module("ray")
torch: Any = import_module("torch")
tensordict: Any = import_module("tensordict")
transfer_queue: Any = import_module("transfer_queue")

FIELDS = ["tokens", "logprobs", "reward"]


def batch_of(first_row: int, num_rows: int) -> Any:
    """Return rows as the peer takes them."""
    rows = [values_of(row) for row in range(first_row, first_row + num_rows)]
    content = {
        "tokens": torch.tensor([tokens for tokens, _, _ in rows], dtype=torch.int64),
        "logprobs": torch.tensor([logprobs for _, logprobs, _ in rows], dtype=torch.float64),
        "reward": torch.tensor([[reward] for _, _, reward in rows], dtype=torch.float64),
    }
    return tensordict.TensorDict(content, batch_size=num_rows)


def put(client: Any, order: Mapping[str, Any]) -> dict[str, Any]:
    """Put the rows of a step."""
    size = order["batch_size"]
    batches = [batch_of(first, size) for first in range(0, order["num_rows"], size)]
    start_s = time.perf_counter()
    for batch in batches:
        client.put(batch, partition_id=str(order["step"]))
    return {"wall_s": time.perf_counter() - start_s}


def get(client: Any, order: Mapping[str, Any]) -> dict[str, Any]:
    """Get the rows of a step."""
    size = order["batch_size"]
    batches = []
    start_s = time.perf_counter()
    for _ in range(0, order["num_rows"], size):
        found = client.get_meta(
            data_fields=FIELDS, batch_size=size, partition_id=str(order["step"]), mode="fetch", task_name="train"
        )
        batches.append(client.get_data(found))
    wall_s = time.perf_counter() - start_s
    rows = [row for batch in batches for row in batch["tokens"].unbind()]
    if [len(row) for row in rows] != [NUM_VALUES] * order["num_rows"]:
        raise RuntimeError(f"got {len(rows)} rows, not {order['num_rows']} of {NUM_VALUES} tokens")
    client.clear_partition(str(order["step"]))
    return {"wall_s": wall_s, "sum_of_last": sum(int(row[-1]) for row in rows)}


def run_role(role: str, address: str) -> None:
    """Serve puts or gets."""
    ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    transfer_queue.init()
    client = transfer_queue.get_client()
    serve(lambda order: (put if role == "producer" else get)(client, order))


def run_owner() -> None:
    """Start the peer and its two clients, and pass orders on to them."""
    context = ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
    transfer_queue.init()
    address = context.address_info["address"]
    with ExitStack() as stack:
        sides = {
            role: stack.enter_context(Side([sys.executable, __file__, role, address]))
            for role in ("producer", "consumer")
        }
        serve(lambda order: sides[order["role"]].run(order))
    transfer_queue.close()
    ray.shutdown()


if __name__ == "__main__":
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    if len(sys.argv) == 3:
        run_role(sys.argv[1], sys.argv[2])
    else:
        run_owner()
