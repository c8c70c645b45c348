import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from flexmarl.core.errors import BackendError
from flexmarl.core.layout import PackedObject, plan_layout
from flexmarl.models import FlatParameters

pytestmark = pytest.mark.unit


def tiny_llama(seed: int, *, tied: bool = False) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=11,
        hidden_size=8,
        intermediate_size=12,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=16,
        tie_word_embeddings=tied,
    )
    return LlamaForCausalLM(config).eval()


def logits(model: nn.Module) -> Tensor:
    with torch.no_grad():
        result: Tensor = model(torch.tensor([[1, 5, 2]])).logits
    return result


@pytest.mark.parametrize("tied", [False, True])
def test_moving_the_parameters_changes_no_bit_of_them_or_of_the_result(tied: bool) -> None:
    model = tiny_llama(0, tied=tied)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    expected = logits(model)

    FlatParameters(model)

    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert torch.equal(logits(model), expected)


def test_every_parameter_is_a_view_at_its_offset_and_aligned() -> None:
    model = tiny_llama(0)

    flat = FlatParameters(model)

    assert sorted(flat.tensors) == sorted(dict(model.named_parameters()))
    for name, parameter in model.named_parameters():
        assert parameter.data_ptr() % 64 == 0
        assert parameter.data_ptr() == flat.buffer.data_ptr() + flat.layout.by_name[name].offset_bytes
        assert flat.tensors[name] is parameter
    assert [entry.name for entry in flat.layout.entries] == list(flat.tensors) == sorted(flat.tensors)


def test_tied_tensors_lie_once_and_stay_tied() -> None:
    model, source = tiny_llama(0, tied=True), FlatParameters(tiny_llama(1, tied=True))

    flat = FlatParameters(model)
    flat.copy_from(source.packed())

    assert "model.embed_tokens.weight" in flat.layout.by_name
    assert "lm_head.weight" not in flat.layout.by_name
    assert model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()
    assert torch.equal(model.lm_head.weight, source.tensors["model.embed_tokens.weight"])


def test_tensors_that_share_memory_without_being_one_object_stay_tied() -> None:
    first, second = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
    second.weight = nn.Parameter(first.weight.data)

    flat = FlatParameters(nn.Sequential(first, second))

    assert list(flat.layout.by_name) == ["0.weight"]
    assert first.weight.data_ptr() == second.weight.data_ptr() == flat.buffer.data_ptr()


def test_persistent_buffers_belong_to_the_weights_and_others_do_not() -> None:
    model = nn.BatchNorm1d(3)
    model.register_buffer("cache", torch.ones(2), persistent=False)

    flat = FlatParameters(model)

    assert list(flat.layout.by_name) == ["bias", "num_batches_tracked", "running_mean", "running_var", "weight"]
    model(torch.randn(4, 3))
    assert flat.tensors["num_batches_tracked"].item() == 1
    assert flat.buffer[64:72].view(torch.int64).item() == 1


def test_copy_from_gives_equal_weights_digest_and_result() -> None:
    source, model = tiny_llama(1), tiny_llama(2)
    source_flat, flat = FlatParameters(source), FlatParameters(model)
    assert flat.digest() != source_flat.digest()

    flat.copy_from(source_flat.packed())

    assert flat.digest() == source_flat.digest() == source_flat.packed().digest()
    assert torch.equal(logits(model), logits(source))


def test_packed_is_the_memory_itself_and_read_only() -> None:
    flat = FlatParameters(tiny_llama(0))
    packed = flat.packed()

    flat.buffer[:4] = torch.tensor([1, 2, 3, 4], dtype=torch.uint8)

    assert bytes(packed.buffer[:4]) == b"\1\2\3\4"
    with pytest.raises(TypeError, match="read-only"):
        packed.buffer[0] = 0


def test_an_optimizer_built_before_trains_the_moved_parameters() -> None:
    model = nn.Linear(2, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    flat = FlatParameters(model)
    model.weight.data.fill_(1.0)

    model(torch.tensor([[2.0, 4.0]])).sum().backward()
    optimizer.step()

    assert flat.buffer[:8].view(torch.float32).tolist() == [0.0, -1.0]


def test_padding_is_zero_so_that_equal_weights_have_equal_digests() -> None:
    arena = torch.full((1 << 16,), 255, dtype=torch.uint8)
    flat, other = FlatParameters(tiny_llama(3), buffer=arena), FlatParameters(tiny_llama(3))

    assert flat.digest() == other.digest()


def test_lives_at_the_start_of_an_arena_and_leaves_the_rest_alone() -> None:
    model = tiny_llama(0)
    arena = torch.full((1 << 16,), 7, dtype=torch.uint8)

    flat = FlatParameters(model, buffer=arena)

    assert flat.buffer.data_ptr() == arena.data_ptr()
    assert len(flat.buffer) == flat.layout.num_bytes
    assert set(arena[flat.layout.num_bytes :].tolist()) == {7}


@pytest.mark.parametrize(
    ("buffer", "message"),
    [
        (torch.zeros(64, dtype=torch.uint8), "has 64 bytes; the parameters need 128"),
        (torch.zeros(1 << 10), "float32"),
        (torch.zeros(8, 128, dtype=torch.uint8), "shape"),
        (torch.zeros(1 << 10, dtype=torch.uint8)[4:], "multiple of 64"),
    ],
)
def test_an_arena_that_does_not_fit_is_refused(buffer: Tensor, message: str) -> None:
    with pytest.raises(BackendError, match=message):
        FlatParameters(nn.Linear(2, 2), buffer=buffer)


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ([("bias", "float32", (2,), 8), ("weight", "float32", (2, 3), 24)], r"got weight float32 \[2, 3\]"),
        ([("bias", "bfloat16", (2,), 4), ("weight", "float32", (2, 2), 16)], r"got bias bfloat16 \[2\], expected bias"),
        ([("bias", "float32", (2,), 8), ("wait", "float32", (2, 2), 16)], "got wait"),
        ([("bias", "float32", (2,), 8)], "1 tensors, expected 2; weight is missing"),
        (
            [("bias", "float32", (2,), 8), ("weight", "float32", (2, 2), 16), ("x", "float32", (1,), 4)],
            "3 tensors, expected 2; x is unknown",
        ),
    ],
)
def test_weights_of_another_model_are_refused_by_the_first_difference(
    tensors: list[tuple[str, str, tuple[int, ...], int]], message: str
) -> None:
    flat = FlatParameters(nn.Linear(2, 2))
    before = flat.digest()
    layout = plan_layout(tensors)

    with pytest.raises(BackendError, match=message):
        flat.copy_from(PackedObject(layout=layout, buffer=memoryview(bytes(layout.num_bytes))))
    assert flat.digest() == before
