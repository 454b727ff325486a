"""Text embeddings and retrieval for ddpforge: encoders, contrastive losses, evaluation."""

ddpforge_plugin_api = 3
