"""Do strategies train alike? `specs` says which, `runs` trains under each, `probe` watches, `compare` judges."""
