"""Hugging Face configs: from a `config.json` to the fields of a `ModelArch`. `config` is the way in."""
