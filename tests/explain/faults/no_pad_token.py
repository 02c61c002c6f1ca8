"""A batch of texts of several lengths, and a tokenizer without a padding token."""

from job import start, train
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

rank, _ = start(timeout_s=60)
words = Tokenizer(models.WordLevel({"one": 0, "two": 1, "[UNK]": 2}, unk_token="[UNK]"))
words.pre_tokenizer = pre_tokenizers.Whitespace()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=words)
for step in train():
    if rank == 1 and step == 3:
        tokenizer(["one", "one two"], padding=True)
