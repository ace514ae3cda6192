"""Data modules: what is in a batch, and that validation rows never change."""

import pytest
import torch

from lightning_chimera.data import CausalLMDataModule, MaskedLMDataModule, Texts, TrainedTokenizer
from lightning_chimera.data.datamodule import TokenRows

WORDS = ["the", "quick", "brown", "fox", "jumps", "over", "the", "lazy", "dog", "and", "sleeps", "in", "the", "sun"]


class Corpus:
    """Documents of 10 to 39 words."""

    def __init__(self):
        self.loads = 0

    def load(self):
        self.loads += 1
        train = tuple(" ".join(WORDS[(i + j) % len(WORDS)] for j in range(10 + i)) for i in range(30))
        return Texts(train, (" ".join(WORDS * 5), " ".join(WORDS)))


@pytest.fixture
def causal(tmp_path):
    return CausalLMDataModule(
        Corpus(), TrainedTokenizer("byte_bpe", 300, str(tmp_path)), sequence_length=16, batch_size=4
    )


@pytest.fixture
def masked(tmp_path):
    return MaskedLMDataModule(
        Corpus(), TrainedTokenizer("wordpiece", 120, str(tmp_path)), sequence_length=16, batch_size=4
    )


def test_causal_batches_are_blocks_with_their_own_ids_as_labels(causal):
    causal.setup("fit")
    for batch in causal.train_dataloader():
        assert set(batch) == {"input_ids", "labels"}
        assert batch["input_ids"].shape == (4, 16)
        assert batch["input_ids"].dtype == torch.int64
        assert torch.equal(batch["input_ids"], batch["labels"])


def test_causal_blocks_are_the_text_in_order_with_an_end_behind_each_document(causal):
    causal.setup("fit")
    first, second = causal.corpus.load().validation
    ids = causal.validation_rows.columns["input_ids"].flatten()
    text = causal.tokenizer.decode(ids)
    assert text == f"{first}<|endoftext|>{second}<|endoftext|>"[: len(text)]
    assert "<|endoftext|>" in text


def test_causal_data_need_a_tokenizer_with_an_end_of_text(causal, tmp_path):
    causal.tokenizer_source = TrainedTokenizer("wordpiece", 120, str(tmp_path))
    with pytest.raises(ValueError, match="has no eos_token"):
        causal.setup("fit")


def test_masked_batches_mask_some_tokens_and_label_only_those(masked):
    masked.setup("fit")
    batches = list(masked.train_dataloader())
    ids, mask, labels = (torch.cat([b[key] for b in batches]) for key in ("input_ids", "attention_mask", "labels"))
    assert set(batches[0]) == {"input_ids", "attention_mask", "labels"}
    assert ids.shape[1] == 16
    assert (labels[mask == 0] == -100).all(), "padding has no label"
    assert (labels[:, 0] == -100).all(), "[CLS] has no label"
    assert (labels[torch.arange(len(ids)), mask.sum(1) - 1] == -100).all(), "[SEP] has no label"
    masked_share = (labels != -100).sum() / mask.sum()
    assert 0.05 < masked_share < 0.3


def test_masked_rows_start_with_cls_and_are_padded(masked):
    masked.setup("fit")
    rows = masked.train_rows.columns
    assert (rows["input_ids"][:, 0] == 2).all()
    assert (rows["input_ids"][rows["attention_mask"] == 0] == 0).all()
    assert (rows["attention_mask"].sum(1) < 16).any()


def test_masked_training_rows_are_masked_anew_each_time(masked):
    masked.setup("fit")
    rows = [masked.train_rows[i] for i in range(8)]
    collate = masked.train_collate()
    assert not torch.equal(collate(rows)["labels"], collate(rows)["labels"])


def test_masked_validation_rows_are_masked_once_and_in_every_process_alike(masked, tmp_path):
    other = MaskedLMDataModule(Corpus(), masked.tokenizer_source, sequence_length=16, batch_size=4)
    torch.manual_seed(1)
    masked.setup("fit")
    torch.manual_seed(2)
    other.setup("fit")
    for ours, theirs in zip(masked.val_dataloader(), other.val_dataloader(), strict=True):
        assert set(ours) == {"input_ids", "attention_mask", "labels"}
        assert all(torch.equal(ours[key], theirs[key]) for key in ours)
        assert (ours["labels"] != -100).any()


@pytest.mark.parametrize("kind", ["causal", "masked"])
def test_making_the_rows_leaves_the_global_generator_alone(kind, request):
    datamodule = request.getfixturevalue(kind)
    torch.manual_seed(0)
    expected = torch.rand(1)
    torch.manual_seed(0)
    datamodule.prepare_data()
    datamodule.setup("fit")
    assert torch.rand(1) == expected


def test_training_batches_are_full_and_validation_uses_every_row(causal):
    causal.setup("fit")
    assert all(len(batch["input_ids"]) == 4 for batch in causal.train_dataloader())
    seen = sum(len(batch["input_ids"]) for batch in causal.val_dataloader())
    assert seen == len(causal.validation_rows)
    assert seen % 4, "the case is worth testing only if the last batch is short"


def test_preparing_trains_the_tokenizer_that_setup_finds(causal, monkeypatch):
    causal.prepare_data()
    monkeypatch.setattr(TrainedTokenizer, "_train", lambda *_: pytest.fail("trained again"))
    causal.setup("fit")


def test_a_second_setup_does_nothing(causal):
    causal.setup("fit")
    rows, loads = causal.train_rows, causal.corpus.loads
    causal.setup("validate")
    assert causal.train_rows is rows
    assert causal.corpus.loads == loads


def test_too_little_text_is_refused_with_what_to_change(causal):
    causal.batch_size = 1000
    with pytest.raises(ValueError, match=r"training rows of 16 tokens, but 1000 are needed\. Use more text, or lower"):
        causal.setup("fit")


@pytest.mark.parametrize("argument", ["sequence_length", "batch_size"])
def test_numbers_below_one_are_refused(argument):
    arguments = {"sequence_length": 16, "batch_size": 4, argument: 0}
    with pytest.raises(ValueError, match=f"{argument}=0 must be 1 or more"):
        CausalLMDataModule(Corpus(), TrainedTokenizer("byte_bpe", 300), **arguments)


def test_a_masking_probability_out_of_range_is_refused():
    with pytest.raises(ValueError, match=r"mlm_probability=1\.5 must lie between 0 and 1"):
        MaskedLMDataModule(
            Corpus(),
            TrainedTokenizer("wordpiece", 120),
            sequence_length=16,
            batch_size=4,
            mlm_probability=1.5,
        )


def test_token_rows_give_a_row_of_each_column():
    rows = TokenRows({"a": torch.arange(6).view(3, 2), "b": torch.arange(3)})
    assert len(rows) == 3
    assert rows[1]["a"].tolist() == [2, 3]
    assert rows[1]["b"].item() == 1
