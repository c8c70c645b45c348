"""Random sequences of set, get, delete and letting go, against a dictionary."""

import shutil
import tempfile
from pathlib import Path

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from flexmarl.core.errors import StoreError
from flexmarl.core.ids import ObjectKey
from flexmarl.core.layout import PackedObject, packed_digest, plan_layout
from flexmarl.objects import HostObjectPlane, copy_into, tensor_layout, unpack

pytestmark = pytest.mark.property

DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.uint8, torch.bool]
KEYS = st.builds(ObjectKey, st.just("weights"), st.sampled_from(["a", "b"]), st.integers(0, 3))


@given(
    specs=st.dictionaries(
        st.text("abcxyz._", min_size=1, max_size=6),
        st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(0, 5), max_size=3), st.integers(0, 1000)),
        max_size=6,
    )
)
def test_packing_gives_back_every_bit_at_aligned_offsets(
    specs: dict[str, tuple[torch.dtype, list[int], int]],
) -> None:
    tensors = {}
    for name, (dtype, shape, seed) in specs.items():
        generator = torch.Generator().manual_seed(seed)
        tensors[name] = torch.randint(0, 2, shape, generator=generator).to(dtype)
    layout = tensor_layout(tensors)
    flat = torch.full((layout.num_bytes,), 255, dtype=torch.uint8)

    copy_into(flat, layout, tensors)

    reference = b""
    for name in sorted(tensors):
        raw = bytes(tensors[name].reshape(-1).view(torch.uint8).numpy().data)
        reference += raw + bytes(-len(raw) % 64)
    assert bytes(flat.numpy().data) == reference
    assert all(torch.equal(view, tensors[name]) for name, view in unpack(layout, flat).items())
    assert packed_digest(layout, flat.numpy().data) == packed_digest(layout, memoryview(reference))


class Recycling(RuleBasedStateMachine):
    """Invariant: what a reader has mapped never changes, whatever is deleted and stored meanwhile."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp())
        self.planes = [HostObjectPlane(self.folder), HostObjectPlane(self.folder)]
        self.stored: dict[ObjectKey, bytes] = {}
        self.readers: list[tuple[memoryview, bytes]] = []

    @rule(key=KEYS, value=st.integers(0, 255), num_pages=st.integers(1, 4), writer=st.integers(0, 1))
    def store(self, key: ObjectKey, value: int, num_pages: int, writer: int) -> None:
        content = bytes([value]) * (num_pages * 4096)
        layout = plan_layout([("x", "uint8", (len(content),), len(content))])
        packed = PackedObject(layout=layout, buffer=memoryview(content))
        if self.stored.get(key, content) != content:
            with pytest.raises(StoreError, match="other content"):
                self.planes[writer].set(key, packed)
        else:
            assert self.planes[writer].set(key, packed).result(1.0).digest == packed.digest()
            self.stored[key] = content

    @rule(key=KEYS, reader=st.integers(0, 1))
    def read(self, key: ObjectKey, reader: int) -> None:
        if key in self.stored:
            self.readers.append((self.planes[reader].packed(key).buffer, self.stored[key]))
        else:
            assert self.planes[reader].info(key) is None

    @rule(key=KEYS)
    def delete(self, key: ObjectKey) -> None:
        self.planes[0].delete(key)
        self.stored.pop(key, None)

    @rule(place=st.integers(0, 100))
    def let_go(self, place: int) -> None:
        if self.readers:
            self.readers.pop(place % len(self.readers))

    @invariant()
    def readers_see_what_they_mapped(self) -> None:
        assert all(bytes(buffer) == content for buffer, content in self.readers)

    @invariant()
    def the_folder_holds_the_stored_objects(self) -> None:
        assert len(list((self.folder / "objects").iterdir())) == len(self.stored)

    def teardown(self) -> None:
        self.readers.clear()
        shutil.rmtree(self.folder)


Recycling.TestCase.settings = settings(max_examples=30, stateful_step_count=30, deadline=None)
TestRecycling = Recycling.TestCase
