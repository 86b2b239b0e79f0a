//! Tokenizer, chat template, and the parser of channels and tool calls.
