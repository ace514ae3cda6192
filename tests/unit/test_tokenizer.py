"""Tokenizers: trained once, cached whole, with the special tokens that GPT-2 and BERT expect."""

import concurrent.futures
import re

import pytest

from lightning_chimera.data import SavedTokenizer, TokenizerSource, TrainedTokenizer
from lightning_chimera.data.tokenizer import default_cache_dir

TEXTS = ["the quick brown fox jumps over the lazy dog", "the dog sleeps while the fox jumps"] * 20


@pytest.fixture
def cache_dir(tmp_path):
    return str(tmp_path / "cache")


def test_byte_bpe_takes_any_text_and_gives_it_back(cache_dir):
    tokenizer = TrainedTokenizer("byte_bpe", 300, cache_dir).build(TEXTS)
    text = "The fox \u2014 it jumps!\n\n    over"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert len(tokenizer) <= 300


def test_byte_bpe_learns_from_the_texts(cache_dir):
    tokenizer = TrainedTokenizer("byte_bpe", 300, cache_dir).build(TEXTS)
    assert len(tokenizer("the fox jumps")["input_ids"]) < len("the fox jumps")


def test_byte_bpe_has_gpt2_special_tokens(cache_dir):
    tokenizer = TrainedTokenizer("byte_bpe", 300, cache_dir).build(TEXTS)
    assert tokenizer.bos_token_id == tokenizer.eos_token_id == 0
    assert tokenizer.eos_token == "<|endoftext|>"


def test_wordpiece_has_bert_special_tokens(cache_dir):
    tokenizer = TrainedTokenizer("wordpiece", 120, cache_dir).build(TEXTS)
    assert tokenizer.convert_ids_to_tokens(range(5)) == ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    assert tokenizer.pad_token_id == 0
    assert tokenizer.mask_token_id == 4


def test_wordpiece_puts_a_text_between_cls_and_sep_in_lower_case(cache_dir):
    tokenizer = TrainedTokenizer("wordpiece", 120, cache_dir).build(TEXTS)
    ids = tokenizer("The Fox")["input_ids"]
    assert tokenizer.decode(ids) == "[CLS] the fox [SEP]"


@pytest.mark.parametrize("kind", ["byte_bpe", "wordpiece"])
def test_training_twice_gives_the_same_file(kind, tmp_path):
    sources = [TrainedTokenizer(kind, 300, str(tmp_path / name)) for name in ("one", "two")]
    for source in sources:
        source.build(TEXTS)
    first, second = (source.cached_file(TEXTS).read_text() for source in sources)
    assert first == second


def test_the_second_build_reads_the_cache(cache_dir, monkeypatch):
    source = TrainedTokenizer("byte_bpe", 300, cache_dir)
    first = source.build(TEXTS)
    monkeypatch.setattr(TrainedTokenizer, "_train", lambda *_: pytest.fail("trained again"))
    assert source.build(TEXTS).get_vocab() == first.get_vocab()


def test_the_cache_tells_corpus_kind_and_size_apart(cache_dir):
    files = {
        TrainedTokenizer("byte_bpe", 300, cache_dir).cached_file(TEXTS),
        TrainedTokenizer("byte_bpe", 301, cache_dir).cached_file(TEXTS),
        TrainedTokenizer("wordpiece", 300, cache_dir).cached_file(TEXTS),
        TrainedTokenizer("byte_bpe", 300, cache_dir).cached_file(TEXTS[1:]),
    }
    assert len(files) == 4


def test_processes_that_train_at_once_leave_one_whole_file(cache_dir):
    source = TrainedTokenizer("byte_bpe", 300, cache_dir)
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        tokenizers = list(pool.map(lambda _: source.build(TEXTS), range(8)))
    assert len({tuple(sorted(tokenizer.get_vocab().items())) for tokenizer in tokenizers}) == 1
    assert [path.name for path in source.cached_file(TEXTS).parent.iterdir()] == ["tokenizer.json"]


def test_the_cache_follows_xdg(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_cache_dir() == tmp_path / "lightning_chimera"
    assert TrainedTokenizer("byte_bpe", 300).cache_dir == tmp_path / "lightning_chimera"


def test_an_unknown_kind_lists_the_known_ones():
    with pytest.raises(ValueError, match=r"kind='bpe' is not a kind of tokenizer\. Choose one of: byte_bpe, wordpiece"):
        TrainedTokenizer("bpe", 300)


@pytest.mark.parametrize(("kind", "needed"), [("byte_bpe", 257), ("wordpiece", None)])
def test_a_vocabulary_without_room_for_the_characters_is_refused(kind, needed, cache_dir):
    with pytest.raises(ValueError, match=f"vocab_size=20 is too small.* Set it to {needed or ''}"):
        TrainedTokenizer(kind, 20, cache_dir).build(TEXTS)


def test_a_saved_tokenizer_is_read_from_its_folder(cache_dir, tmp_path):
    trained = TrainedTokenizer("byte_bpe", 300, cache_dir).build(TEXTS)
    trained.save_pretrained(tmp_path / "saved")
    saved = SavedTokenizer(str(tmp_path / "saved"), vocab_size=300).build(())
    assert saved.get_vocab() == trained.get_vocab()
    assert saved.eos_token_id == 0


def test_a_saved_tokenizer_has_to_fit_the_models_table(cache_dir, tmp_path):
    TrainedTokenizer("byte_bpe", 300, cache_dir).build(TEXTS).save_pretrained(tmp_path / "saved")
    with pytest.raises(ValueError, match=re.escape("the model's table has vocab_size=100. Set vocab_size to ")):
        SavedTokenizer(str(tmp_path / "saved"), vocab_size=100).build(())


def test_both_are_what_a_data_module_asks_for():
    assert isinstance(TrainedTokenizer("byte_bpe", 300), TokenizerSource)
    assert isinstance(SavedTokenizer("anywhere", 300), TokenizerSource)
