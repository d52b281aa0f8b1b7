"""What a test knows of the logits processor that fails when asked to, without vLLM, which importing that takes."""

NAME = "tests.support.poison_processor:Poison"
WORDS = "this request is poison"
