"""The shipped pair `tiny`: the generator of its corpus, its tokenizer, its training stages."""
