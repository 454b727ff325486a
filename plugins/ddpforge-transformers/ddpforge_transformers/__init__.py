"""Models, tokenizers and tasks of Hugging Face transformers for ddpforge."""

ddpforge_plugin_api = 3
