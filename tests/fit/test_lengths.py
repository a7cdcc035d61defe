"""Padded and packed sequences, beside the documents alone in eager torch."""

import pytest
import torch
import transformers as hf
from jax.sharding import PartitionSpec as P
from torch.utils.data import DataLoader

import torch_shard as ts
from tests.oracles.steps import step_of

SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4}
DOCUMENTS = [torch.randint(1, 64, (n,), generator=torch.Generator().manual_seed(n)) for n in (5, 9, 3, 12, 4, 7, 2, 11)]


def llama():
    torch.manual_seed(0)
    return hf.LlamaForCausalLM(
        hf.LlamaConfig(**SIZES, num_key_value_heads=2, vocab_size=64, max_position_embeddings=64)
    )


def loss_fn(model, batch):
    return model(**batch).loss


def make_step(model, optimizer):
    plan = ts.ShardingPlan({"**.q_proj.weight": P("model")}, default=P())
    return step_of(model, loss_fn, optimizer, mesh=(2, 2), plan=plan)


def alone(model):
    """The mean over all tokens that follow another of their document."""
    total = sum(loss_fn(model, {"input_ids": d[None], "labels": d[None]}) * (len(d) - 1) for d in DOCUMENTS)
    return total / sum(len(d) - 1 for d in DOCUMENTS)


def test_packed_documents_train_as_alone():
    model = llama()
    packed = ts.pack(DOCUMENTS, length=16, batch_size=4)
    (batch,) = packed
    assert packed.num_tokens == sum(map(len, DOCUMENTS))
    assert packed.num_slots == 4 * 16
    expected = alone(model)
    expected.backward()
    step = make_step(model, torch.optim.SGD(model.parameters(), lr=0.1))
    updated = {name: p.detach() - 0.1 * p.grad for name, p in model.named_parameters()}
    state, metrics = step(step.init(seed=0), batch)
    assert float(metrics["loss"]) == pytest.approx(expected.item(), rel=1e-5)
    for name, value in step.export(state).named_parameters():
        torch.testing.assert_close(value, updated[name], rtol=1e-4, atol=1e-6, msg=name)  # sums in another order


def collate(documents):
    size = max(map(len, documents))
    ids = torch.zeros(len(documents), size, dtype=torch.int64)
    mask, labels = torch.zeros_like(ids), torch.full_like(ids, -100)
    for number, document in enumerate(documents):
        for tensor, value in ((ids, document), (mask, 1), (labels, document)):
            tensor[number, : len(document)] = value
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def test_padded_batches_have_the_losses_of_eager_torch_and_few_shapes():
    model = llama()
    loader = ts.bucket(DataLoader(DOCUMENTS, batch_size=2, collate_fn=collate), lengths=[10, 16])
    assert len(loader) == 4
    with torch.no_grad():
        wanted = [loss_fn(model, collate(DOCUMENTS[n : n + 2])).item() for n in range(0, 8, 2)]
    step = make_step(model, torch.optim.SGD(model.parameters(), lr=0.0))
    state, found = step.init(seed=0), []
    for batch in [*loader, *loader]:  # it begins anew with each epoch
        state, metrics = step(state, batch)
        found.append(float(metrics["loss"]))
    assert found == pytest.approx(2 * wanted, rel=1e-5)
    assert step.num_compiles == 2
    assert loader.seen == {10: {9: 2, 7: 2}, 16: {12: 2, 11: 2}}


def test_what_is_no_sequence_stays():
    (batch,) = ts.bucket([{"x": torch.ones(2, 3, 4), "weight": torch.ones(2), "name": "a"}], lengths=[5], pad={"x": 7})
    assert batch["x"].shape == (2, 5, 4)
    assert batch["x"][0, :, 0].tolist() == [1, 1, 1, 7, 7]
    assert batch["weight"].shape == (2,)
    assert batch["name"] == "a"


def test_long_documents_are_cut_and_the_last_batch_is_filled_or_left_out():
    documents = [list(range(1, 12)), [20, 21]]
    first, last = ts.pack(documents, length=5, batch_size=2, pad_token_id=63)
    assert first["input_ids"].tolist() == [[1, 2, 3, 4, 5], [6, 7, 8, 9, 10]]
    assert last["input_ids"].tolist() == [[11, 20, 21, 63, 63], [63] * 5]
    assert last["labels"].tolist() == [[-100, -100, 21, -100, -100], [-100] * 5]
    assert last["position_ids"].tolist() == [[0, 0, 1, 0, 1], [0, 1, 2, 3, 4]]
    assert len(list(ts.pack(documents, length=5, batch_size=2, drop_last=True))) == 1


@pytest.mark.parametrize(
    ("make", "error", "says"),
    [
        (lambda: ts.bucket([], lengths=[]), ValueError, "lengths must have one at least"),
        (lambda: ts.bucket([], lengths=[0]), ValueError, "lengths must be"),
        (lambda: list(ts.bucket([torch.ones(2, 3)], lengths=[4])), TypeError, "a batch must be a dict"),
        (lambda: list(ts.bucket([{"x": torch.ones(2)}], lengths=[4])), TypeError, "no tensor of the batch has a dim 1"),
        (lambda: list(ts.bucket([{"x": torch.ones(2, 5)}], lengths=[4])), ValueError, "more than the longest of"),
        (lambda: ts.pack([], length=0, batch_size=1), ValueError, "length must be"),
        (lambda: list(ts.pack([[1.5]], length=4, batch_size=1)), TypeError, "a document must be integers in one dim"),
    ],
)
def test_bad_input_is_refused(make, error, says):
    with pytest.raises(error, match=says):
        make()
