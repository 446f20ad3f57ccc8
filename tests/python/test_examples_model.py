"""The example model is a causal GPT that learns; its text is real, always the same, and lost nowhere."""

import sysconfig
from itertools import islice

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from examples.gpt import GPT, GPTConfig
from examples.text import Tokenizer, batches, load_text

SMALL = GPTConfig(vocab_size=23, context=12, num_layers=2, num_heads=2, width=16)
SOURCE = load_text(200_000)
TOKENIZER = Tokenizer(SOURCE, vocab_size=600)


@pytest.fixture(autouse=True)
def one_thread():
    """The models are so small that threads would only wait for each other."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


def small_gpt(seed: int = 0, **changes) -> GPT:
    torch.manual_seed(seed)
    return GPT(GPTConfig(**(vars(SMALL) | changes)))


def slow_logits(model: GPT, tokens: list[int]) -> torch.Tensor:
    """The logits of the last position of one sequence, written out head by head and position by position."""
    width, num_heads = model.config.width, model.config.num_heads
    size = width // num_heads
    stream = [model.tokens.weight[token] + model.positions.weight[i] for i, token in enumerate(tokens)]
    for block in model.blocks:
        rows = [block.attention.query_key_value(block.norm_attention(x)) for x in stream]
        for i in range(len(stream)):
            heads = []
            for head in range(num_heads):
                part = slice(head * size, (head + 1) * size)
                scores = [rows[i][:width][part] @ rows[j][width : 2 * width][part] / size**0.5 for j in range(i + 1)]
                weights = torch.stack(scores).softmax(dim=0)
                heads.append(sum(weights[j] * rows[j][2 * width :][part] for j in range(i + 1)))
            stream[i] = stream[i] + block.attention.out(torch.cat(heads))
        stream = [x + block.contract(torch.nn.functional.gelu(block.expand(block.norm_mlp(x)))) for x in stream]
    return model.head(model.norm(stream[-1]))


@pytest.mark.parametrize("tied", [False, True])
@torch.no_grad()
def test_the_model_computes_what_attention_written_out_by_hand_computes(tied):
    model = small_gpt(tied=tied).double()
    for parameter in model.parameters():  # large enough that every part of the model shows in the logits
        parameter.add_(torch.randn_like(parameter) / 4)
    tokens = torch.randint(23, (1, 7))
    # both in float64: they differ by the order of sums of at most a few hundred terms
    torch.testing.assert_close(model(tokens)[0][0, -1], slow_logits(model, tokens[0].tolist()), rtol=1e-10, atol=1e-10)


@torch.no_grad()
def test_no_position_sees_a_later_token():
    model, tokens = small_gpt(), torch.randint(23, (2, 12))
    for length in [1, 2, 7, 11]:
        edited = tokens.clone()
        edited[:, length:] = (edited[:, length:] + 1) % 23
        assert torch.equal(model(tokens)[0][:, :length], model(edited)[0][:, :length])
        assert not torch.equal(model(tokens)[0][:, length:], model(edited)[0][:, length:])


def test_the_loss_is_the_mean_negative_log_likelihood_of_the_targets():
    model, tokens, targets = small_gpt(), torch.randint(23, (3, 5)), torch.randint(23, (3, 5))
    logits, loss = model(tokens, targets)
    likelihood = logits.double().log_softmax(dim=-1).gather(2, targets[..., None])
    torch.testing.assert_close(loss.double(), -likelihood.mean(), rtol=1e-6, atol=0)
    assert model(tokens)[1] is None


def test_a_tied_head_is_the_embedding_itself():
    tied, untied = small_gpt(tied=True), small_gpt()
    assert tied.head.weight is tied.tokens.weight
    num_parameters = [sum(p.numel() for p in model.parameters()) for model in (tied, untied)]
    assert num_parameters[1] - num_parameters[0] == 23 * 16


@pytest.mark.parametrize("tied", [False, True])
def test_a_small_model_learns_a_line_by_heart_and_recites_it(tied):
    line = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8]])  # what follows a 1, 3 or 5 depends on what came before
    model = small_gpt(tied=tied)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(60):
        model(line[:, :-1], line[:, 1:])[1].backward()
        optimizer.step()
        optimizer.zero_grad()
    assert torch.equal(model.generate(line[:, :1], num_tokens=11, temperature=0), line)


def test_generated_text_keeps_its_prompt_outgrows_the_context_and_depends_on_the_seed_alone():
    model, prompt = small_gpt(), torch.randint(23, (2, 5))

    def generate(seed):
        return model.generate(prompt, num_tokens=20, generator=torch.Generator().manual_seed(seed))

    assert generate(1).shape == (2, 25)
    assert torch.equal(generate(1)[:, :5], prompt)
    assert torch.equal(generate(1), generate(1))
    assert not torch.equal(generate(1), generate(2))


def test_the_text_is_source_code_and_the_same_every_time():
    assert load_text(200_000) == SOURCE
    assert "import" in SOURCE and "def __init__(self" in SOURCE


def test_the_text_is_files_in_the_order_of_their_paths_cut_by_bytes_and_never_inside_a_character(tmp_path, monkeypatch):
    files = {
        "b.py": "é = 1\n",
        "a/z.py": "z\n",
        "test/t.py": "t\n",
        "site-packages/s.py": "s\n",
        "a/a.txt": "a\n",
    }
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(content, encoding="utf-8")
    monkeypatch.setattr(sysconfig, "get_path", lambda name: {"stdlib": tmp_path}[name])
    assert load_text(1000) == "z\né = 1\n"
    assert [load_text(n) for n in range(6)] == ["", "z", "z\n", "z\n", "z\né", "z\né "]


@given(st.text())
def test_any_text_comes_back_from_its_tokens(text):
    assert TOKENIZER.decode(TOKENIZER.encode(text)) == text


def test_tokens_are_fewer_than_bytes_and_below_the_vocabulary_size():
    tokens = TOKENIZER.encode(SOURCE)
    assert TOKENIZER.vocab_size == 600
    assert tokens.dtype is torch.int64 and tokens.min() >= 0 and tokens.max() < 600
    assert len(tokens) < len(SOURCE.encode()) / 2


def test_the_tokenizer_learned_from_a_text_is_the_same_every_time():
    again = Tokenizer(SOURCE, vocab_size=600)
    assert torch.equal(again.encode(SOURCE), TOKENIZER.encode(SOURCE))


@given(length=st.integers(2, 40), batch=st.integers(1, 5), context=st.integers(1, 39), seed=st.integers(0, 2**32))
def test_batches_are_windows_of_the_tokens_and_targets_come_one_later(length, batch, context, seed):
    context = min(context, length - 1)
    tokens = torch.arange(length) + 100
    for inputs, targets in islice(batches(tokens, batch, context, seed), 3):
        assert inputs.shape == targets.shape == (batch, context)
        for row, following in zip(inputs, targets, strict=True):
            start = int(row[0]) - 100
            assert torch.equal(row, tokens[start : start + context])
            assert torch.equal(following, tokens[start + 1 : start + 1 + context])


def test_every_window_occurs_and_the_seed_decides_the_order():
    def starts(seed):
        return [int(x) for inputs, _ in islice(batches(torch.arange(6), 4, 3, seed), 50) for x in inputs[:, 0]]

    assert set(starts(0)) == {0, 1, 2}
    assert starts(0) == starts(0) != starts(1)


def test_drawing_batches_leaves_torchs_own_random_numbers_alone():
    torch.manual_seed(5)
    next(batches(torch.arange(9), 2, 3, seed=1))
    drawn = torch.rand(1)
    torch.manual_seed(5)
    assert torch.equal(drawn, torch.rand(1))
