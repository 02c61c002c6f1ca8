"""The exported network, as transformers runs it, against paceline's own."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from test_gpt import CONFIG, make_gpt, rows

from paceline.config import MIN_VOCAB_SIZE
from paceline.data.tokenizer import Tokenizer, train_tokenizer
from paceline.train import export

SAME = {"rtol": 0, "atol": 1e-5}
TEXTS = ["def f(x):\n    return x  # 你好, naïve 🙂", " two  spaces ", ""]


@pytest.fixture(scope="module")
def transformers():
    """Imported by the tests that need it: it takes seconds of every test process that collects."""
    return pytest.importorskip("transformers", reason="needs transformers")


@pytest.fixture(scope="module")
def exported_class(transformers) -> type:
    from paceline.model.modeling_paceline import PacelineForCausalLM

    return PacelineForCausalLM


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_tokenizer(iter([*TEXTS, "hello world " * 9]), vocab_size=300)


@pytest.fixture
def convert(tmp_path, tokenizer, exported_class):
    """Returns a function that exports a model and loads it again."""

    def make(model, **options):
        configs = export.export_configs(model.config, tokenizer, origin={})
        export.write_files(tmp_path, export.export_weights(model), tokenizer, configs)
        return exported_class.from_pretrained(tmp_path, **options).eval()

    return make


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"n_kv_head": 1},
        {"n_kv_head": 4, "window_pattern": "L"},
        {"n_layer": 1, "n_embd": 8, "n_head": 1, "n_kv_head": 1},  # gates have all 8 channels
        {"n_layer": 5, "n_embd": 40},  # heads together are narrower than the stream
        {"n_layer": 8, "window_pattern": "SSSL", "vocab_size": 129},  # 63 rows of padding
        {"vocab_size": 128},  # none
    ],
    ids=str,
)
@torch.no_grad()
def test_logits_and_loss_are_those_of_paceline_in_one_pass_and_through_the_cache(changes, convert):
    model = make_gpt(config := replace(CONFIG, **changes))
    exported = convert(model)
    idx, _ = rows(config)
    whole, expected = exported(idx, labels=idx.masked_fill(idx < 3, -100)), model.logits(idx)
    torch.testing.assert_close(whole.logits, expected, **SAME)
    targets = idx[:, 1:].masked_fill(idx[:, 1:] < 3, -1)
    nats = model(idx[:, :-1], targets) / (targets >= 0).sum()
    torch.testing.assert_close(whole.loss, nats)
    cache, parts = None, []
    for tokens in idx.split((7, 1, 150, 1, 141), dim=1):
        out = exported(tokens, past_key_values=cache, use_cache=True)
        cache = out.past_key_values
        parts.append(out.logits)
    torch.testing.assert_close(torch.cat(parts, 1), expected, **SAME)


@torch.no_grad()
def test_a_row_has_the_same_logits_with_padding_on_either_side(convert):
    exported = convert(make_gpt())
    idx, _ = rows(num_tokens=180)
    expected = exported(idx).logits
    mask = torch.ones(2, 200, dtype=torch.long)
    mask[0, :20], mask[1, 180:] = 0, 0
    padded = torch.stack((F.pad(idx[0], (20, 0)), F.pad(idx[1], (0, 20))))
    logits = exported(padded, attention_mask=mask).logits
    torch.testing.assert_close(torch.stack((logits[0, 20:], logits[1, :180])), expected, **SAME)
    assert logits.isfinite().all()


def test_generation_is_the_same_with_and_without_a_cache_and_padding_and_with_beams_or_guesses(convert):
    exported = convert(make_gpt(replace(CONFIG, n_layer=2, vocab_size=300, sequence_len=140)))
    prompts = [[0, 40, 41, 42, 40, 41], [0, 77]]
    ids = torch.tensor([[0] * (6 - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (6 - len(prompt)) + [1] * len(prompt) for prompt in prompts])

    def new_tokens(idx, **options):
        settings = {"max_new_tokens": 150, "min_new_tokens": 150, "do_sample": False}  # past sequence_len
        return exported.generate(idx, **settings, **options)[:, -150:]

    alone = torch.cat([new_tokens(torch.tensor([prompt])) for prompt in prompts])
    assert torch.equal(new_tokens(ids, attention_mask=mask), alone)
    assert torch.equal(new_tokens(ids[:1], use_cache=False), alone[:1])
    assert torch.equal(new_tokens(ids[:1], prompt_lookup_num_tokens=2), alone[:1])
    beams = [new_tokens(ids, attention_mask=mask, num_beams=3, use_cache=use_cache) for use_cache in (True, False)]
    assert torch.equal(*beams)


def test_what_it_cannot_compute_is_refused(convert):
    exported = convert(make_gpt())
    idx, _ = rows(num_tokens=8)
    with pytest.raises(ValueError, match="does not take position_ids"):
        exported(idx, position_ids=idx)
    with pytest.raises(ValueError, match=r"attention_mask is \(2, 3\), not \(2, 8\)"):
        exported(idx, attention_mask=torch.ones(2, 3))
    with pytest.raises(ValueError, match="takes a DynamicCache, not a StaticCache"):
        exported.generate(idx, cache_implementation="static", max_new_tokens=2)
    with pytest.raises(NotImplementedError, match="vocabulary of this model is fixed"):
        exported.resize_token_embeddings(200)


@torch.no_grad()
def test_in_bf16_it_is_as_near_as_a_bf16_run_and_keeps_the_scalars_in_fp32(convert):
    exact, narrow = make_gpt(), make_gpt(compute_dtype=torch.bfloat16)
    exported = convert(exact, dtype=torch.bfloat16)
    idx, _ = rows()
    error = (exported(idx).logits - exact.logits(idx)).norm()
    assert error < 1.1 * (narrow.logits(idx) - exact.logits(idx)).norm()
    fp32 = {name for name, p in exported.named_parameters() if p.dtype == torch.float32}
    assert fp32 == {"resid_lambdas", "x0_lambdas", "smear_lambda", "backout_lambda"}


@pytest.mark.parametrize("checkpointing", [False, True])
def test_the_trainer_takes_a_step_on_padded_rows_and_saves_a_model_that_loads(
    checkpointing, convert, exported_class, transformers, tokenizer, tmp_path
):
    exported = convert(make_gpt(replace(CONFIG, vocab_size=tokenizer.vocab_size)))
    fast = transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path)
    before = {name: p.clone() for name, p in exported.named_parameters()}
    arguments = transformers.TrainingArguments(
        str(tmp_path / "out"),
        max_steps=1,
        gradient_checkpointing=checkpointing,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        save_steps=1,
    )
    trainer = transformers.Trainer(
        model=exported,
        args=arguments,
        train_dataset=[dict(fast("hello " * n)) for n in (3, 5, 9)],
        data_collator=transformers.DataCollatorForLanguageModeling(fast, mlm=False),
    )
    trainer.train()
    assert [name for name, p in exported.named_parameters() if torch.equal(p, before[name])] == []
    saved = exported_class.from_pretrained(tmp_path / "out" / "checkpoint-1")
    assert all(torch.equal(p, saved.get_parameter(name)) for name, p in exported.named_parameters())


def test_weights_that_are_too_large_for_one_file_become_several(convert, tmp_path, monkeypatch):
    monkeypatch.setattr(export, "SHARD_BYTES", 30_000)
    model = make_gpt()
    exported = convert(model)
    assert len(list(tmp_path.glob("model-*-of-*.safetensors"))) > 2
    weights = export.export_weights(model)
    assert all(torch.equal(p, weights[name]) for name, p in exported.named_parameters())


def test_a_text_becomes_the_tokens_of_the_run_behind_the_token_between_documents_and_comes_back(
    convert, transformers, tokenizer, tmp_path
):
    convert(make_gpt())
    fast = transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path)
    for text in TEXTS:
        ids = fast(text)["input_ids"]
        assert ids == [tokenizer.bos_id, *tokenizer.encode(text)]
        assert fast.decode(ids, skip_special_tokens=True) == text
    assert fast("a<|bos|>b", add_special_tokens=False)["input_ids"] == [
        *tokenizer.encode("a"),
        tokenizer.bos_id,
        *tokenizer.encode("b"),
    ]
    plain = fast("<|bos|>", add_special_tokens=False, split_special_tokens=True)["input_ids"]
    assert plain == tokenizer.encode("<|bos|>")
    assert (fast.bos_token_id, fast.eos_token_id, fast.pad_token_id, fast.padding_side) == (0, 0, 0, "left")
    assert tokenizer.vocab_size == len(fast) >= MIN_VOCAB_SIZE
